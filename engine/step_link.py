"""How the ranks of a tensor-parallel group get their steps from the one that schedules, over ZMQ. No torch.

A message is a `StepBatch` or one of `Other`: the group has no tokens in a step of other groups, nobody has work, there
is an order to carry out, or all is over.
"""

from collections.abc import Callable

import msgspec
import zmq

from engine.step import StepBatch
from engine.types import OrderKind


class Idle(msgspec.Struct, frozen=True, tag=True):
    """Take part in a step without tokens; the fields are what the scheduling ranks agreed on."""

    max_rank_tokens: int
    all_ranks_decode: bool


class Rest(msgspec.Struct, frozen=True, tag=True):
    """Nobody has work: take part in what ranks do then."""


class Obey(msgspec.Struct, frozen=True, tag=True):
    """Carry out an order, such as the start of a profile, that the first rank has carried out."""

    kind: OrderKind


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop."""


Other = Idle | Rest | Obey | Stop
"""A message that is no step."""

_STEP, _OTHER = b"s", b"o"  # the first byte of a message
_encoder = msgspec.msgpack.Encoder()
_decoder: "msgspec.msgpack.Decoder[Other]" = msgspec.msgpack.Decoder(Other)


class StepSender:
    """Sends every step to the ranks that follow; `sockets` are connected PUSH sockets, one a rank."""

    def __init__(self, sockets: "list[zmq.Socket[bytes]]") -> None:
        self._sockets = sockets

    def send(self, message: StepBatch | Other) -> None:
        """Send to all of them; does not wait for any."""
        if not self._sockets:
            return
        data = _STEP + message.pack() if isinstance(message, StepBatch) else _OTHER + _encoder.encode(message)
        for socket in self._sockets:
            socket.send(data)


class StepReceiver:
    """The other end: a bound PULL socket."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    def receive(self, timeout_ms: int, turn: Callable[[], None]) -> StepBatch | Other:
        """The next message. Calls `turn` at least every `timeout_ms` while there is none."""
        while not self._socket.poll(timeout_ms):
            turn()
        turn()
        data = memoryview(self._socket.recv())
        return StepBatch.unpack(data[1:]) if data[:1] == _STEP else _decoder.decode(data[1:])
