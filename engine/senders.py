"""`Senders`: the sockets from an HTTP process to the ranks that schedule. Sends each message to who has to know it."""

import contextlib

import msgspec
import zmq

from engine.config import EngineConfig
from engine.loads import Loads
from engine.messages import Abort, Add, Join, Leave, ToEngine
from engine.router import Router
from engine.types import CallOff


class Senders:
    """A request and its end go to one scheduler. Processes come, go and call off at the first scheduler, which tells
    the others. Anything else goes to all schedulers.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", router: Router) -> None:
        self._context = context
        self._router = router
        self._sockets: dict[int, zmq.Socket[bytes]] = {}  # by scheduler
        self._encoder = msgspec.msgpack.Encoder()

    def connect(self, scheduler: int, address: str) -> None:
        """Send to a scheduler from now on. Does nothing if that is so already."""
        if scheduler in self._sockets:
            return
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.connect(address)
        self._sockets[scheduler] = socket

    def send(self, message: ToEngine) -> None:
        """Send a message; if the engine is gone, nothing happens."""
        frame = self._encoder.encode(message)
        with contextlib.suppress(zmq.ZMQError):  # the streams of an engine that is gone have been ended
            for scheduler in self._schedulers_for(message):
                self._sockets[scheduler].send(frame, zmq.NOBLOCK)

    def _schedulers_for(self, message: ToEngine) -> list[int]:
        if isinstance(message, Add):
            return [self._router.choose(message.request)]
        if isinstance(message, Abort):
            scheduler = self._router.find(message.request_id)
            return [] if scheduler is None else [scheduler]
        return [0] if isinstance(message, CallOff | Join | Leave) else list(self._sockets)


def make_router(config: EngineConfig, loads: Loads | None) -> Router:
    """The router of an HTTP process; `loads` as there."""
    return Router(
        config.data_parallel_size, max_running=config.max_num_seqs, max_requests=config.max_requests, loads=loads
    )
