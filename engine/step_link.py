"""How the ranks of a tensor-parallel group get their steps from the one that schedules, over ZMQ. No torch.

A message is a `StepBatch`, or says that the group has no tokens in a step of other groups, or that all is over.
"""

from collections.abc import Callable

import msgspec
import zmq

from engine.step import StepBatch


class Idle(msgspec.Struct, frozen=True, tag=True):
    """Take part in a step without tokens; the fields are what the scheduling ranks agreed on."""

    max_rank_tokens: int
    all_ranks_decode: bool


class Rest(msgspec.Struct, frozen=True, tag=True):
    """Nobody has work: take part in what ranks do then."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop."""


_STEP, _OTHER = b"s", b"o"  # the first byte of a message
_encoder = msgspec.msgpack.Encoder()
_decoder: "msgspec.msgpack.Decoder[Idle | Rest | Stop]" = msgspec.msgpack.Decoder(Idle | Rest | Stop)


class StepSender:
    """Sends every step to the ranks that follow; `sockets` are connected PUSH sockets, one a rank."""

    def __init__(self, sockets: "list[zmq.Socket[bytes]]") -> None:
        self._sockets = sockets

    def send(self, message: StepBatch | Idle | Rest | Stop) -> None:
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

    def receive(self, timeout_ms: int, turn: Callable[[], None]) -> StepBatch | Idle | Rest | Stop:
        """The next message. Calls `turn` at least every `timeout_ms` while there is none."""
        while not self._socket.poll(timeout_ms):
            turn()
        turn()
        data = memoryview(self._socket.recv())
        return StepBatch.unpack(data[1:]) if data[:1] == _STEP else _decoder.decode(data[1:])
