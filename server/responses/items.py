"""Output items of /v1/responses while they grow: the events that open, continue and close each of them."""

import uuid
from abc import ABC, abstractmethod
from typing import Any

from typing_extensions import override

from server.choice import Piece
from server.parsers import Kind
from server.schema.chat import TokenLogprob

Payload = dict[str, Any]
"""An event without its sequence number."""


class OpenItem(ABC):
    """One item. `texts` are the deltas so far."""

    prefix: str

    def __init__(self, piece: Piece, output_index: int) -> None:
        """The item that begins with this piece."""
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self._part_of_answer = (piece.kind, piece.call)
        self._at: Payload = {"item_id": self.id, "output_index": output_index}
        self._output_index = output_index

    def takes(self, piece: Piece) -> bool:
        """Whether a piece belongs to this item."""
        return piece.name is None and (piece.kind, piece.call) == self._part_of_answer

    @abstractmethod
    def opening(self) -> list[Payload]:
        """Events before the first delta."""

    @abstractmethod
    def delta(self, text: str, logprobs: list[TokenLogprob]) -> Payload:
        """The event of new text."""

    @abstractmethod
    def closing(self, status: str) -> list[Payload]:
        """Events after the last delta."""

    @abstractmethod
    def item(self, status: str) -> Payload:
        """The item as it is now; one in progress is still empty."""

    def _added(self) -> Payload:
        return {
            "type": "response.output_item.added",
            "output_index": self._output_index,
            "item": self.item("in_progress"),
        }

    def _done(self, status: str) -> Payload:
        return {
            "type": "response.output_item.done",
            "output_index": self._output_index,
            "item": self.item(status),
        }


class TextItem(OpenItem):
    """An item with one part of text."""

    text_event: str

    def __init__(self, piece: Piece, output_index: int) -> None:
        super().__init__(piece, output_index)
        self._at["content_index"] = 0

    @abstractmethod
    def part(self, text: str) -> Payload:
        """The part with this text."""

    @override
    def opening(self) -> list[Payload]:
        return [self._added(), {"type": "response.content_part.added", **self._at, "part": self.part("")}]

    @override
    def delta(self, text: str, logprobs: list[TokenLogprob]) -> Payload:
        return {"type": f"{self.text_event}.delta", **self._at, "delta": text}

    @override
    def closing(self, status: str) -> list[Payload]:
        text = "".join(self.texts)
        return [
            {"type": f"{self.text_event}.done", **self._at, "text": text},
            {"type": "response.content_part.done", **self._at, "part": self.part(text)},
            self._done(status),
        ]

    def _content(self, status: str) -> list[Payload]:
        return [] if status == "in_progress" else [self.part("".join(self.texts))]


class ReasoningItem(TextItem):
    """The whole reasoning, readable; so there is neither a summary nor an encrypted copy."""

    prefix = "rs"
    text_event = "response.reasoning_text"

    @override
    def part(self, text: str) -> Payload:
        return {"type": "reasoning_text", "text": text}

    @override
    def item(self, status: str) -> Payload:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": self._content(status),
            "encrypted_content": None,
        }


class MessageItem(TextItem):
    """Text for the user."""

    prefix = "msg"
    text_event = "response.output_text"

    @override
    def part(self, text: str) -> Payload:
        logprobs = list(self.logprobs) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    @override
    def delta(self, text: str, logprobs: list[TokenLogprob]) -> Payload:
        return {**super().delta(text, logprobs), "logprobs": logprobs}

    @override
    def closing(self, status: str) -> list[Payload]:
        text_done, *others = super().closing(status)
        return [{**text_done, "logprobs": self.logprobs}, *others]

    @override
    def item(self, status: str) -> Payload:
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": self._content(status),
        }


class CallItem(OpenItem):
    """A call of a function."""

    prefix = "fc"

    def __init__(self, piece: Piece, output_index: int) -> None:
        super().__init__(piece, output_index)
        self._name = piece.name or ""
        self._call_id = f"call_{uuid.uuid4().hex[:24]}"

    @override
    def opening(self) -> list[Payload]:
        return [self._added()]

    @override
    def delta(self, text: str, logprobs: list[TokenLogprob]) -> Payload:
        return {"type": "response.function_call_arguments.delta", **self._at, "delta": text}

    @override
    def closing(self, status: str) -> list[Payload]:
        arguments = "".join(self.texts)
        done = {"type": "response.function_call_arguments.done", **self._at, "name": self._name}
        return [{**done, "arguments": arguments}, self._done(status)]

    @override
    def item(self, status: str) -> Payload:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self.texts),
        }


_CLASSES: dict[Kind, type[OpenItem]] = {
    Kind.REASONING: ReasoningItem,
    Kind.CONTENT: MessageItem,
    Kind.TOOL_CALL: CallItem,
}


def opened_item(piece: Piece, output_index: int) -> OpenItem:
    """The item that begins with this piece."""
    return _CLASSES[piece.kind](piece, output_index)
