"""`ChunkRenderer`: what chat and completions share: chunks with `choices`, usage, and `[DONE]` after the last one."""

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from typing_extensions import override

from engine.version import service_version
from server.choice import Piece
from server.convert import PreparedRequest
from server.parsers import Kind
from server.renderers.base import SAMPLE_TEXT, Event, Renderer, TokenCounts, count_tokens
from server.schema.common import GenerationRequest, StreamOptions, Usage


class ChunkRenderer(Renderer):
    """Every chunk has one entry of `choices`; the last one, if usage was asked for, has none."""

    body_object: str
    chunk_object: str
    end_marker = b"data: [DONE]\n\n"
    prompt_ids_are_in_choices = False
    """Where `return_token_ids` puts those of the prompt: into each choice, or beside `choices`."""

    def __init__(self, prepared: PreparedRequest, wire: GenerationRequest, *, model: str, request_id: str) -> None:
        super().__init__(prepared, model=model)
        options = wire.stream_options or StreamOptions()
        self._ends_with_usage = not wire.stream or bool(options.include_usage)
        self._has_running_usage = bool(options.continuous_usage_stats)
        self._returns_timings = bool(wire.return_timings)
        self._returns_ids = bool(wire.return_token_ids)
        self._num_returned = [0] * len(self.choices)  # ids of the answer
        self._head = {
            "id": request_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"moe-serve-{service_version()}",
        }
        self._begun: set[int] = set()  # choices that have a chunk
        self._around_text: dict[tuple[int, Kind], list[bytes]] = {}

    @override
    def begin(self) -> Sequence[Event]:
        return []  # each choice begins with its own first output

    @override
    def pieces(self, index: int, pieces: Sequence[Piece]) -> Sequence[Event]:
        begins, begins_all = index not in self._begun, not self._begun
        entries = self.first_entries(index) if begins else []
        entries += [self.entry(index, piece) for piece in pieces]
        choice = self.choices[index]
        if choice.finish_reason is not None:
            entries.append(self.last_entry(index) | {"finish_reason": choice.finish_reason})
        extra: dict[str, Any] = {}
        if self._has_running_usage:
            num_prompt = len(self.prepared.requests[index].prompt_ids)
            extra["usage"] = _usage(count_tokens(num_prompt, [choice], [choice]))
        chunks = [self._chunk(entry, extra) for entry in entries]
        if chunks:
            self._begun.add(index)
        if self._returns_ids and chunks:
            entries[-1]["token_ids"] = choice.token_ids[self._num_returned[index] :]
            self._num_returned[index] = len(choice.token_ids)
            if begins if self.prompt_ids_are_in_choices else begins_all:
                place = entries[0] if self.prompt_ids_are_in_choices else chunks[0].payload
                place["prompt_token_ids"] = self.prepared.requests[index].prompt_ids
        return chunks

    @override
    def end(self) -> Sequence[Event]:
        extra: dict[str, Any] = {}
        if self._ends_with_usage:
            extra["usage"] = _usage(self.counts)
        if self._returns_timings and self.timings is not None:
            extra["timings"] = self.timings()
        return [Event({**self._head, "object": self.chunk_object, "choices": [], **extra})] if extra else []

    @override
    def fold(self, events: Iterable[Event]) -> dict[str, Any]:
        chunks = [event.payload for event in events]
        entries: list[list[dict[str, Any]]] = [[] for _ in self.choices]
        for chunk in chunks:
            for entry in chunk["choices"]:
                entries[entry["index"]].append(entry)
        choices = [self.folded_entry(own) | {"finish_reason": own[-1]["finish_reason"]} for own in entries]
        body = {**self._head, "object": self.body_object, "choices": choices, "usage": chunks[-1]["usage"]}
        if "timings" in chunks[-1]:
            body["timings"] = chunks[-1]["timings"]
        if self._returns_ids:
            for whole, parts in ((body, chunks), *zip(choices, entries, strict=True)):
                whole.update(_ids_of(parts))
        return body

    @override
    def around_text(self, index: int, kind: Kind) -> Sequence[bytes] | None:
        if index not in self._begun or self._has_running_usage or self._returns_ids:
            return None
        if (index, kind) not in self._around_text:
            sample = self._chunk(self.entry(index, Piece(kind, SAMPLE_TEXT)), {})
            self._around_text[index, kind] = sample.around_sample()
        return self._around_text[index, kind]

    def _chunk(self, entry: dict[str, Any], extra: dict[str, Any]) -> Event:
        return Event({**self._head, "object": self.chunk_object, "choices": [entry], **extra})

    @abstractmethod
    def first_entries(self, index: int) -> list[dict[str, Any]]:
        """Entries of `choices` that come before the first piece of a choice."""

    @abstractmethod
    def entry(self, index: int, piece: Piece) -> dict[str, Any]:
        """The entry of `choices` for a piece."""

    @abstractmethod
    def last_entry(self, index: int) -> dict[str, Any]:
        """The entry of `choices` that ends a choice."""

    @abstractmethod
    def folded_entry(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The entry of a whole answer, from all entries of one choice."""


def _ids_of(parts: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """The token ids of a whole, from its parts."""
    ids: dict[str, list[int]] = {}
    for part in parts:
        for key in ("prompt_token_ids", "token_ids"):
            if key in part:
                ids[key] = ids.get(key, []) + part[key]
    return ids


def _usage(counts: TokenCounts) -> Usage:
    return {
        "prompt_tokens": counts.num_prompt,
        "completion_tokens": counts.num_completion,
        "total_tokens": counts.num_prompt + counts.num_completion,
        "prompt_tokens_details": {"cached_tokens": counts.num_cached},
        "completion_tokens_details": {"reasoning_tokens": counts.num_reasoning},
    }
