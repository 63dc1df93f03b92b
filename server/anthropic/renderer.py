"""`AnthropicRenderer`: the events of /v1/messages. The whole message is a fold of them.

Reasoning, text and each call are a content block of their own, in the order in which the model wrote them:

    message_start, ping                     and a ping whenever nothing else has come for a while
    content_block_start
        text            content_block_delta of text_delta
        thinking        of thinking_delta unless it is hidden, at last one of signature_delta
        tool_use        of input_json_delta
    content_block_stop
    message_delta, message_stop
"""

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from typing_extensions import override

from server.anthropic.errors import anthropic_error
from server.choice import Piece
from server.convert import PreparedRequest
from server.errors import ApiError
from server.parsers import Kind
from server.renderers.base import SAMPLE_TEXT, Event, Renderer
from server.schema.anthropic import AnswerBlock, AnthropicAnswer, AnthropicUsage, StopReason
from server.schema.limits import is_too_deep

SIGNATURE = "unsigned"
"""Clients want one and send it back. It holds nothing, so hidden reasoning is lost for later turns."""

_HIDDEN_PER_PING = 32
"""Pieces of hidden reasoning after which a ping says that the answer goes on."""

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
_STOP_REASONS: dict[str, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicRenderer(Renderer):
    """One answer. A block opens with its first piece and closes when a piece of another one comes."""

    keep_alive = Event({"type": "ping"}, "ping").encode()

    def __init__(self, prepared: PreparedRequest, *, model: str, message_id: str, shows_thinking: bool = True) -> None:
        super().__init__(prepared, model=model)
        self._id = message_id
        self._shows_thinking = shows_thinking
        self._num_hidden = 0  # pieces of reasoning
        self._num_blocks = 0  # opened so far; the last one is open while `_open` is set
        self._open: tuple[Kind, int] | None = None
        self._open_type = ""
        self._around_text: list[bytes] | None = None  # of a delta of the open block

    @override
    def begin(self) -> Sequence[Event]:
        message: AnthropicAnswer = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._usage(), "output_tokens": 0},
        }
        return [_event("message_start", message=message), _event("ping")]

    @override
    def pieces(self, index: int, pieces: Sequence[Piece]) -> Sequence[Event]:
        events = [event for piece in pieces if piece.text or piece.name for event in self._piece(piece)]
        return [*events, *self._close()] if self.is_finished(index) else events

    @override
    def end(self) -> Sequence[Event]:
        choice = self.choices[0]
        sequence = choice.matched_stop
        reason = "stop_sequence" if sequence is not None else _STOP_REASONS[str(choice.finish_reason)]
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [_event("message_delta", delta=delta, usage=self._usage()), _event("message_stop")]

    @override
    def fold(self, events: Iterable[Event]) -> dict[str, Any]:
        message: dict[str, Any] = {}
        texts: list[str] = []
        for payload in (event.payload for event in events):
            match payload["type"]:
                case "message_start":
                    message = {**payload["message"], "content": []}
                case "content_block_start":
                    message["content"].append(dict(payload["content_block"]))
                    texts = []
                case "content_block_delta":
                    kind, *value = payload["delta"].values()
                    if kind == "signature_delta":
                        message["content"][-1]["signature"] = value[0]
                    else:
                        texts += value
                case "content_block_stop":
                    _fill(message["content"][-1], "".join(texts))
                case "message_delta":
                    message |= {**payload["delta"], "usage": payload["usage"]}
        return message

    @override
    def failure(self, error: ApiError, request_id: str) -> Sequence[Event]:
        return [Event(anthropic_error(error, request_id), "error")]

    @override
    def encode(self, index: int, pieces: Sequence[Piece]) -> bytes:
        """A delta is a sample of its block's deltas with other text."""
        is_delta = len(pieces) == 1 and bool(pieces[0].text) and not self.is_finished(index)
        if not is_delta or not self._takes(pieces[0]) or self._hides(pieces[0].kind):
            return super().encode(index, pieces)
        return orjson.dumps(pieces[0].text)[1:-1].join(self._around_delta())

    @override
    def around_text(self, index: int, kind: Kind) -> Sequence[bytes] | None:
        return self._around_delta() if self._open == (kind, -1) and not self._hides(kind) else None

    def _hides(self, kind: Kind) -> bool:
        return kind is Kind.REASONING and not self._shows_thinking

    def _takes(self, piece: Piece) -> bool:
        """Whether a piece belongs to the open block."""
        return piece.name is None and self._open == (piece.kind, piece.call)

    def _piece(self, piece: Piece) -> list[Event]:
        events: list[Event] = []
        if not self._takes(piece):
            events = self._close()
            block = _begun_block(piece)
            self._open, self._open_type = (piece.kind, piece.call), block["type"]
            self._num_blocks += 1
            events.append(_event("content_block_start", index=self._num_blocks - 1, content_block=block))
        if piece.text and not self._hides(piece.kind):
            events.append(self._delta(piece.text))
        elif piece.text:
            self._num_hidden += 1
            if self._num_hidden % _HIDDEN_PER_PING == 0:
                events.append(_event("ping"))
        return events

    def _delta(self, text: str) -> Event:
        kind, field = _DELTAS[self._open_type]
        return _event("content_block_delta", index=self._num_blocks - 1, delta={"type": kind, field: text})

    def _around_delta(self) -> list[bytes]:
        if self._around_text is None:
            self._around_text = self._delta(SAMPLE_TEXT).around_sample()
        return self._around_text

    def _close(self) -> list[Event]:
        """Close the open block, if there is one."""
        if self._open is None:
            return []
        index, events = self._num_blocks - 1, list[Event]()
        if self._open_type == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            events.append(_event("content_block_delta", index=index, delta=delta))
        self._open = self._around_text = None
        return [*events, _event("content_block_stop", index=index)]

    def _usage(self) -> AnthropicUsage:
        counts = self.counts
        return {
            "input_tokens": counts.num_prompt - counts.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.num_cached,
            "output_tokens": counts.num_completion,
            "output_tokens_details": {"thinking_tokens": counts.num_reasoning},
        }


def _event(kind: str, **fields: Any) -> Event:
    return Event({"type": kind, **fields}, kind)


def _begun_block(piece: Piece) -> AnswerBlock:
    if piece.kind is Kind.CONTENT:
        return {"type": "text", "text": ""}
    if piece.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": piece.name or "", "input": {}}


def _fill(block: dict[str, Any], text: str) -> None:
    """Put the text of all deltas into a block. Arguments that are no JSON object, or too deep a one, stay text."""
    if block["type"] != "tool_use":
        block[block["type"]] = text
        return
    try:
        arguments = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        arguments = None
    is_kept = isinstance(arguments, dict) and not is_too_deep(arguments)
    block["input"] = arguments if is_kept else {"arguments": text}
