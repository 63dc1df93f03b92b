"""The engine process: reads requests from a socket, steps the core, sends its outputs. Started by `engine.client`.

It ignores Ctrl-C (the parent decides when to stop) and ends when its standard input closes, which the system does for
a parent that dies in whatever way.
"""

import gc
import logging
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import zmq

from engine.messages import (
    EXIT_FAILED,
    Abort,
    Add,
    Beat,
    Failed,
    FromEngine,
    Join,
    Leave,
    Ready,
    ToEngine,
    WorkerSetup,
    bind,
)
from engine.origins import Origins
from engine.process import exit_with_parent

if TYPE_CHECKING:
    from engine.core import EngineCore

BEAT_INTERVAL_S = 0.25
_IDLE_WAIT_MS = 250
_LINGER_MS = 2000  # for the last message before the process ends

logger = logging.getLogger("engine.worker")


class Heartbeat(threading.Thread):
    """Sends a `Beat` at a steady pace, on sockets of its own, whatever the step loop is doing."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.core: EngineCore | None = None
        self.addresses: tuple[str, ...] = (address,)  # replaced as a whole by the step loop
        self._context = context
        self._ended = threading.Event()
        self._turned_s = time.monotonic()

    def turn(self) -> None:
        """The step loop begins another turn."""
        self._turned_s = time.monotonic()

    def run(self) -> None:
        """Thread body."""
        sockets: dict[str, zmq.Socket[bytes]] = {}
        encoder = msgspec.msgpack.Encoder()
        while not self._ended.wait(BEAT_INTERVAL_S):
            core, addresses = self.core, self.addresses
            beat = Beat(None, 0.0) if core is None else Beat(core.stats(), time.monotonic() - self._turned_s)
            for address in sockets.keys() - set(addresses):
                sockets.pop(address).close(linger=0)
            for address in addresses:
                if address not in sockets:
                    sockets[address] = _connect(self._context, address)
                sockets[address].send(encoder.encode(beat))
        for socket in sockets.values():
            socket.close(linger=0)  # a process that is gone must not hold up the end

    def end(self) -> None:
        """Stop beating and wait for the thread."""
        self._ended.set()
        self.join()


class Worker:
    """Sockets, heartbeat and step loop of the engine process."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._requests = _open(self._context, zmq.PULL)
        bind(self._requests, setup.requests_address)
        self._origins = Origins(
            lambda address: _connect(self._context, address), setup.outputs_address, setup.config.max_requests
        )
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._heartbeat = Heartbeat(self._context, setup.outputs_address)

    def run(self, build: "Callable[[WorkerSetup], EngineCore]") -> int:
        """Load, serve until told to stop; the exit status of the process."""
        self._heartbeat.start()
        try:
            core = build(self._setup)
            gc.collect()
            gc.freeze()  # the model's objects live as long as the process: no collection need walk them again
            self._heartbeat.turn()
            self._heartbeat.core = core
            self._send(Ready(core.info))
            self._serve(core)
            status = 0
        except Exception as error:  # the last stop: say why, then end
            if not _is_user_error(error):  # the other process tells what a user can mend, once
                logger.exception("the engine stops")
            self._send(Failed(_describe(error)))
            status = EXIT_FAILED
        self._heartbeat.end()
        self._context.destroy(linger=_LINGER_MS)
        return status

    def _serve(self, core: "EngineCore") -> None:
        while self._take_requests(core):
            self._origins.send_outputs(core.step())

    def _take_requests(self, core: "EngineCore") -> bool:
        """Hand everything that has arrived to the core; wait a little if it has nothing else to do. False: stop."""
        self._heartbeat.turn()
        if not core.has_work:
            self._requests.poll(_IDLE_WAIT_MS)
            self._heartbeat.turn()
        while True:
            try:
                frame = self._requests.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            message = self._decoder.decode(frame)
            if isinstance(message, Add):
                self._origins.add(core, message)
            elif isinstance(message, Abort):
                self._origins.abort(core, message.request_id)
            elif isinstance(message, Join):
                self._origins.join(message, Ready(core.info))
                self._heartbeat.addresses = self._origins.addresses
            elif isinstance(message, Leave):
                self._origins.leave(core, message.origin)
                self._heartbeat.addresses = self._origins.addresses
            else:
                return False

    def _send(self, message: FromEngine) -> None:
        self._origins.broadcast(message)


def _open(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.set_hwm(0)  # a slow reader must not hold up the step loop; the number of requests bounds what can pile up
    return socket


def _connect(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> "zmq.Socket[bytes]":
    socket = _open(context, zmq.PUSH)
    socket.connect(address)
    return socket


def _is_user_error(error: Exception) -> bool:
    """A wrong file or setting: the error trees of the packages derive from ValueError, a bug raises it plainly."""
    return isinstance(error, OSError) or (isinstance(error, ValueError) and type(error) is not ValueError)


def _describe(error: Exception) -> str:
    return str(error) if _is_user_error(error) else f"{type(error).__name__}: {error}"


def build_core(setup: WorkerSetup) -> "EngineCore":
    """The core of these settings, with the number of CPU threads they ask for."""
    import torch

    from engine.core import EngineCore
    from moe.cpu.threads import usable_cpus

    # One core stays free for the HTTP process: OpenMP's threads spin at their barriers, so a step that shares its last
    # core with anything else is many times slower, not a little.
    num_free_cores = max(1, usable_cpus() - 1)
    torch.set_num_threads(setup.config.num_threads or min(torch.get_num_threads(), num_free_cores))
    return EngineCore(setup.config)


def main(build: "Callable[[WorkerSetup], EngineCore]" = build_core) -> None:
    """Entry of the process; `build` makes the core."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup: WorkerSetup = pickle.load(sys.stdin.buffer)
    logging.basicConfig(level=setup.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    threading.Thread(target=exit_with_parent, name="parent-watch", daemon=True).start()
    sys.exit(Worker(setup).run(build))


if __name__ == "__main__":
    main()
