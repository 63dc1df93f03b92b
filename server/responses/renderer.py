"""`ResponsesRenderer`: the events of /v1/responses. The whole answer is the one that the last event carries.

Reasoning, text and each call are an output item of their own, in the order in which the model wrote them:

    response.created, response.in_progress
    response.output_item.added
        reasoning, message    content_part.added, ...delta, ...done, content_part.done
        function_call         function_call_arguments.delta, .done
    response.output_item.done
    response.completed, .incomplete or .failed
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel
from typing_extensions import override

from engine.types import SamplingParams
from server.choice import Piece
from server.convert import PreparedRequest
from server.errors import ApiError
from server.parsers import Kind, TokenBytes
from server.renderers.base import SAMPLE_TEXT, Event, Renderer
from server.renderers.chat import LogprobWriter
from server.renderers.text_events import TextEvents
from server.responses.items import OpenItem, Payload, opened_item
from server.responses.store import ResponseStore
from server.schema.responses import InputItem, ResponseBody, ResponsesRequest, ResponseUsage
from server.token_texts import TokenTexts

log = logging.getLogger(__name__)

_NUMBER = b"0}\n\n"  # ends a sample: its sequence number


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where an answer is stored, whose it is, and the earlier items of its conversation."""

    store: ResponseStore
    owner: str
    history: Sequence[InputItem]


class _NumberedTextEvents(TextEvents):
    """`finish` gets each event without the number that ends it, and its text; it returns the whole event."""

    __slots__ = ("_finish", "_tokenizer")

    def __init__(self, texts: TokenTexts, tokenizer: TokenBytes, finish: Callable[[bytes, str], bytes]) -> None:
        super().__init__(texts)
        self._tokenizer = tokenizer
        self._finish = finish

    @override
    def take_token(self, token_id: int) -> bytes | None:
        event = super().take_token(token_id)
        return event and self._finish(event, self._tokenizer.token_bytes(token_id).decode())


class ResponsesRenderer(Renderer):
    """One answer. An item opens with its first piece and closes when a piece of another one comes."""

    def __init__(
        self,
        prepared: PreparedRequest,
        tokenizer: TokenBytes,
        wire: ResponsesRequest,
        *,
        model: str,
        response_id: str,
        keeping: Keeping | None,
    ) -> None:
        super().__init__(prepared, model=model)
        self._wire = wire
        self._keeping = keeping
        self._logprobs = LogprobWriter(tokenizer) if wire.has_logprobs else None
        self._num_events = 0
        self._output: list[Payload] = []
        self._open: OpenItem | None = None
        self._around_text: list[bytes] | None = None  # of a delta of the open item
        self.text_events = [_NumberedTextEvents(prepared.token_texts, tokenizer, self._numbered)]
        self._response: dict[str, Any] = {
            **_begun(wire, prepared.requests[0].sampling, model, response_id, keeping is not None)
        }

    @override
    def begin(self) -> Sequence[Event]:
        return [self._lifecycle("created"), self._lifecycle("in_progress")]

    @override
    def pieces(self, index: int, pieces: Sequence[Piece]) -> Sequence[Event]:
        events = [event for piece in pieces for event in self._piece(piece)]
        if self.is_finished(index):
            events += self._close("incomplete" if self._is_cut else "completed")
        return events

    @override
    def end(self) -> Sequence[Event]:
        changes = {"output": self._output, "usage": self._usage()}
        if self._is_cut:
            return [self._lifecycle("incomplete", incomplete_details={"reason": "max_output_tokens"}, **changes)]
        return [self._lifecycle("completed", completed_at=int(time.time()), **changes)]

    @override
    def fold(self, events: Iterable[Event]) -> dict[str, Any]:
        *_, last = events
        answer: dict[str, Any] = last.payload["response"]
        return answer

    @override
    def failure(self, error: ApiError, request_id: str) -> Sequence[Event]:
        codes = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        shown = {"code": codes.get(error.status, "server_error"), "message": error.message}
        closing = self._close("incomplete")
        changes = {"error": shown, "output": self._output, "usage": self._usage(), "store": False}
        return [*closing, self._lifecycle("failed", **changes)]

    @property
    def _is_cut(self) -> bool:
        return self.choices[0].finish_reason == "length"

    @override
    async def keep(self) -> None:
        if self._keeping is None:
            return
        put, owner = self._keeping.store.put, self._keeping.owner
        try:
            earlier = [item.model_dump(exclude_unset=True) for item in (*self._keeping.history, *self._wire.input)]
            self._response["store"] = await asyncio.to_thread(put, owner, self._response, [*earlier, *self._output])
        except (sqlite3.Error, orjson.JSONEncodeError):
            log.exception("response %s could not be stored", self._response["id"])
            self._response["store"] = False

    @override
    def encode(self, index: int, pieces: Sequence[Piece]) -> bytes:
        """A delta without log-probabilities is a sample of its item's deltas with other text and another number."""
        item = self._open
        is_plain = len(pieces) == 1 and not pieces[0].tokens and bool(pieces[0].text) and not self.is_finished(index)
        if item is None or not is_plain or not item.takes(pieces[0]):
            return super().encode(index, pieces)
        text = pieces[0].text
        return self._numbered(orjson.dumps(text)[1:-1].join(self._around_delta(item)), text)

    @override
    def around_text(self, index: int, kind: Kind) -> Sequence[bytes] | None:
        item = self._open
        return self._around_delta(item) if item is not None and item.takes(Piece(kind, "")) else None

    def _around_delta(self, item: OpenItem) -> list[bytes]:
        if self._around_text is None:
            delta = item.delta(SAMPLE_TEXT, [])
            *parts, last = Event({**delta, "sequence_number": 0}, delta["type"]).around_sample()
            self._around_text = [*parts, last.removesuffix(_NUMBER)]
        return self._around_text

    def _numbered(self, event: bytes, text: str) -> bytes:
        """The encoded delta of the open item, given all of it but its number, which ends it."""
        if self._open is not None:
            self._open.texts.append(text)
        number, self._num_events = self._num_events, self._num_events + 1
        return b"%b%d}\n\n" % (event, number)

    def _piece(self, piece: Piece) -> list[Event]:
        if not piece.text and piece.name is None:
            return []
        events: list[Event] = []
        if self._open is None or not self._open.takes(piece):
            events = self._close("completed")
            self._open = opened_item(piece, len(self._output))
            events += map(self._event, self._open.opening())
        if piece.text:
            logprobs = self._logprobs.entries(self.choices[0], piece.tokens) if self._logprobs else []
            self._open.texts.append(piece.text)
            self._open.logprobs += logprobs
            events.append(self._event(self._open.delta(piece.text, logprobs)))
        return events

    def _close(self, status: str) -> list[Event]:
        """Close the open item, if there is one."""
        if self._open is None:
            return []
        item, self._open, self._around_text = self._open, None, None
        self._output.append(item.item(status))
        return [self._event(payload) for payload in item.closing(status)]

    def _event(self, payload: Payload) -> Event:
        payload["sequence_number"] = self._num_events
        self._num_events += 1
        return Event(payload, payload["type"])

    def _lifecycle(self, status: str, **changes: Any) -> Event:
        """An event that carries the whole answer."""
        kind = "in_progress" if status == "created" else status
        self._response = {**self._response, "status": kind, **changes}
        return self._event({"type": f"response.{status}", "response": self._response})

    def _usage(self) -> ResponseUsage:
        counts = self.counts
        return {
            "input_tokens": counts.num_prompt,
            "input_tokens_details": {"cached_tokens": counts.num_cached, "cache_write_tokens": 0},
            "output_tokens": counts.num_completion,
            "output_tokens_details": {"reasoning_tokens": counts.num_reasoning},
            "total_tokens": counts.num_prompt + counts.num_completion,
        }


def _begun(wire: ResponsesRequest, sampling: SamplingParams, model: str, response_id: str, store: bool) -> ResponseBody:
    """The answer before anything has been generated."""
    tools = [{"description": None, "parameters": None, "strict": None, **_plain(tool)} for tool in wire.tools or ()]
    text_format = _plain(wire.text.format) if wire.text and wire.text.format else {"type": "text"}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": wire.instructions,
        "max_output_tokens": wire.max_output_tokens,
        "metadata": wire.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": wire.parallel_tool_calls is not False,
        "previous_response_id": wire.previous_response_id,
        "reasoning": {"effort": wire.reasoning.effort if wire.reasoning else None, "summary": None},
        "store": store,
        "temperature": sampling.temperature,
        "text": {"format": text_format, "verbosity": "medium"},
        "tool_choice": wire.tool_choice or "auto",
        "tools": tools,
        "top_logprobs": wire.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _plain(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(by_alias=True, exclude_unset=True)
