"""`Origins`: the processes whose requests the engine serves. Runs in the engine process; outputs go where they belong.

The process that started the engine is the only one at first. It keeps the places of its requests itself, and its
outputs are sent as they come. With `--api-workers` it sends no requests, and HTTP processes join: then the places are
kept here, for all of them, and each gets its outputs of a step in one message. Every rank that schedules has the places
of the requests that it was sent.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from engine.admission import NoPlaceError, Places
from engine.messages import FOUNDER, Add, FromEngine, Held, Join, Outputs, Ready
from engine.types import EngineOutput
from engine.validate import overloaded_output

if TYPE_CHECKING:
    import zmq

    from engine.core import EngineCore


class Origins:
    """Belongs to the step loop's thread. `connect` opens a socket that never blocks."""

    def __init__(
        self,
        connect: "Callable[[str], zmq.Socket[bytes]]",
        founder_address: str,
        max_requests: int,
        *,
        rank: int = 0,
        num_schedulers: int = 1,
    ) -> None:
        """`max_requests` is the number of places of this rank, one of `num_schedulers`."""
        self._connect = connect
        self._rank = rank
        self._num_places_everywhere = max_requests * num_schedulers
        self._addresses = {FOUNDER: founder_address}
        self._sockets = {FOUNDER: connect(founder_address)}
        self._encoder = msgspec.msgpack.Encoder()
        self._is_shared = False  # a process has joined
        self._places = Places(max_requests)
        self._origin_of: dict[str, int] = {}  # of every request that has not ended
        self._gone: set[int] = set()  # what a dead process has sent may arrive after the news of its death
        self._losers: set[str] = set()  # requests that lost their place and have not had their last output
        self._told = (0, 0)  # what the last `Held` was about

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where messages to all go."""
        return tuple(self._addresses.values())

    def join(self, message: Join, ready: Ready) -> None:
        """Serve another process from now on."""
        if message.origin in self._gone:
            return
        self._is_shared = True
        self._addresses[message.origin] = message.address
        self._sockets[message.origin] = self._connect(message.address)
        self._send(message.origin, ready)
        self._send(message.origin, self._held())

    def leave(self, core: "EngineCore", origin: int) -> None:
        """End the requests of a process that is gone. What still arrives from it is ignored."""
        self._gone.add(origin)
        socket = self._sockets.pop(origin, None)
        if socket is not None:
            socket.close(linger=0)
            del self._addresses[origin]
        for request_id in [name for name, its in self._origin_of.items() if its == origin]:
            self.abort(core, request_id)

    def add(self, core: "EngineCore", message: Add) -> None:
        """Hand a request to the core if there is a place for it."""
        request = message.request
        if message.origin == FOUNDER:
            core.add(request)
            return
        if message.origin not in self._sockets:
            return
        try:
            loser = self._places.take(request.request_id, (request.client, request.connection))
        except NoPlaceError:
            refusal = overloaded_output(request.request_id, self._num_places_everywhere)
            self._send(message.origin, Outputs([refusal], rank=self._rank))
            return
        if loser is not None:
            self._losers.add(loser)
            core.abort(loser)
        self._origin_of[request.request_id] = message.origin
        core.add(request)

    def abort(self, core: "EngineCore", request_id: str) -> None:
        """End a request early. Its place is free at once."""
        self._places.free(request_id)
        core.abort(request_id)

    def send_outputs(self, outputs: list[EngineOutput]) -> None:
        """Send what a step brought, one message to each process that has requests in it."""
        if not self._is_shared:
            if outputs:
                self._send(FOUNDER, self._packed(outputs))
            return
        by_origin: dict[int, list[EngineOutput]] = {}
        for output in outputs:
            origin = self._origin_of.get(output.request_id, FOUNDER)
            by_origin.setdefault(origin, []).append(self._note(output))
        for origin, its_outputs in by_origin.items():
            self._send(origin, self._packed(its_outputs))
        self._tell_who_holds_places()

    def broadcast(self, message: FromEngine) -> None:
        """Send to every process."""
        for origin in self._sockets:
            self._send(origin, message)

    def answer(self, origin: int, message: FromEngine) -> None:
        """Send to one process."""
        self._send(origin, message)

    def _note(self, output: EngineOutput) -> EngineOutput:
        """Keep the books; the last output of a request that lost its place becomes a refusal."""
        request_id = output.request_id
        if request_id not in self._losers:
            self._places.on_output(request_id)
        if output.finish_reason is None:
            return output
        self._origin_of.pop(request_id, None)
        self._places.free(request_id)
        if request_id not in self._losers:
            return output
        self._losers.discard(request_id)
        return overloaded_output(request_id, self._num_places_everywhere)

    def _tell_who_holds_places(self) -> None:
        """Tell the processes that joined, if anything has changed."""
        now = (self._places.num_taken, self._places.num_freed)
        if now != self._told:
            self._told = now
            held = self._held()
            for origin in self._sockets:
                if origin != FOUNDER:
                    self._send(origin, held)

    def _held(self) -> Held:
        return Held(dict(self._places.num_by_client), self._places.num_freed, self._rank)

    def _packed(self, outputs: list[EngineOutput]) -> Outputs:
        """The message of a step, with as much as possible in its short part."""
        if len({output.request_id for output in outputs}) < len(outputs):
            return Outputs(outputs, rank=self._rank)  # a step was repeated: only one list keeps the order
        request_ids, token_ids, others = list[str](), list[int](), list[EngineOutput]()
        for output in outputs:
            if _is_token(output):
                request_ids.append(output.request_id)
                token_ids += output.token_ids
            else:
                others.append(output)
        return Outputs(others, msgspec.msgpack.encode(request_ids), token_ids, self._rank)

    def _send(self, origin: int, message: FromEngine) -> None:
        socket = self._sockets.get(origin)
        if socket is not None:  # else its process is gone
            socket.send(self._encoder.encode(message))


def _is_token(output: EngineOutput) -> bool:
    """Whether it is one more token and nothing else."""
    return (
        len(output.token_ids) == 1
        and output.finish_reason is None
        and output.logprobs is None
        and output.prompt_logprobs is None
        and output.queue_s is None
        and not output.num_cached_tokens
    )
