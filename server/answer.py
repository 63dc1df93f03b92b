"""`Answer`: what chat and completions answers share. Makes one body or a stream of events; no I/O."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import orjson

from engine.types import EngineOutput
from server.choice import Choice, Piece
from server.convert import PreparedRequest
from server.parsers import Kind
from server.schema.common import Usage
from server.sse import event
from server.version import service_version

_TEXT = "\0text\0"  # stands for the text in a sample of an event


class Answer(ABC):
    """One answer. Feed every engine output either to `events` (streamed) or to `feed`, then ask for `body`."""

    body_object: str
    chunk_object: str

    def __init__(self, prepared: PreparedRequest, *, model: str, request_id: str) -> None:
        self.prepared = prepared
        self.model = model
        self.choices = [prepared.make_choice(index) for index in range(len(prepared.requests))]
        self._head = {
            "id": request_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"moe-serve-{service_version()}",
        }
        self._begun: set[int] = set()
        self._around_text: dict[tuple[int, Kind, int], list[bytes]] = {}

    def feed(self, index: int, output: EngineOutput) -> None:
        """Take in an output of one request."""
        pieces = self.choices[index].push(output)
        if index not in self._begun:
            self._begun.add(index)
            self.add_first(index)
        for piece in pieces:
            self.add(index, piece)

    def events(self, index: int, output: EngineOutput, *, with_usage: bool = False) -> list[bytes]:
        """Take in an output of one request and return the events to send now; `with_usage` adds the choice's usage."""
        choice = self.choices[index]
        if choice.finish_reason is not None:
            return []
        pieces = choice.push(output)
        begins = index not in self._begun
        if not (begins or with_usage or choice.keeps_tokens or choice.finish_reason):
            return [self._text_event(index, piece) for piece in pieces]
        parts = self.first_parts(index) if begins else []
        self._begun.add(index)
        parts += [self.part(index, piece) for piece in pieces]
        if choice.finish_reason is not None:
            parts.append(self.last_part(index) | {"finish_reason": choice.finish_reason})
        usage = {}
        if with_usage:
            usage["usage"] = _usage(len(self.prepared.requests[index].prompt_ids), [choice], [choice])
        return [self._event(part, usage) for part in parts]

    def is_finished(self, index: int) -> bool:
        """True when no more text of this choice can come."""
        return self.choices[index].finish_reason is not None

    def usage_chunk(self) -> dict[str, Any]:
        """The extra chunk that `include_usage` asks for."""
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": self.usage}

    def _event(self, part: dict[str, Any], usage: dict[str, Any]) -> bytes:
        return event({**self._head, "object": self.chunk_object, "choices": [part], **usage})

    def _text_event(self, index: int, piece: Piece) -> bytes:
        """The event of a piece without log-probabilities. Those of one kind differ in the text only."""
        if piece.name is not None:
            return self._event(self.part(index, piece), {})
        key = (index, piece.kind, piece.call)
        around = self._around_text.get(key)
        if around is None:
            sample = self._event(self.part(index, Piece(piece.kind, _TEXT, call=piece.call)), {})
            around = self._around_text[key] = sample.split(orjson.dumps(_TEXT))
        return orjson.dumps(piece.text).join(around)

    def body(self) -> dict[str, Any]:
        """The complete answer."""
        choices = [self.body_part(index) for index in range(len(self.choices))]
        for index, choice in enumerate(choices):
            choice["finish_reason"] = self.choices[index].finish_reason
        return {**self._head, "object": self.body_object, "choices": choices, "usage": self.usage}

    @property
    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, however many choices it has."""
        return _usage(self.prepared.num_prompt_tokens, self.choices, self.choices[:: self.prepared.num_choices])

    @abstractmethod
    def add(self, index: int, piece: Piece) -> None:
        """Remember a piece for `body`."""

    @abstractmethod
    def add_first(self, index: int) -> None:
        """Remember, for `body`, what comes before the first piece of a choice."""

    @abstractmethod
    def first_parts(self, index: int) -> list[dict[str, Any]]:
        """Entries of `choices` that come before the first piece of a streamed choice."""

    @abstractmethod
    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """The entry of `choices` for a piece of a streamed choice."""

    @abstractmethod
    def last_part(self, index: int) -> dict[str, Any]:
        """The entry of `choices` that ends a streamed choice."""

    @abstractmethod
    def body_part(self, index: int) -> dict[str, Any]:
        """The entry of `choices` of a complete answer."""


def _usage(num_prompt: int, choices: Sequence[Choice], firsts: Sequence[Choice]) -> Usage:
    """Usage of `choices`. `firsts` has the first choice of each prompt: the cached tokens of a prompt count once."""
    num_completion = sum(choice.num_tokens for choice in choices)
    num_cached = sum(choice.num_cached_tokens for choice in firsts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": min(num_cached, num_prompt)},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.num_reasoning_tokens for choice in choices)},
    }
