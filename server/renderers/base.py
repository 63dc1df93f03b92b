"""`Renderer`: writes one answer as one endpoint shows it. Makes events out of pieces of text; no I/O.

    streamed    begin ─▶ pieces, pieces, ... ─▶ end        each event is sent as it comes
    whole       fold(begin + pieces of each choice + end)  the same events, with neighbouring pieces joined

So a streamed answer and a whole one cannot differ in what they say.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from engine.types import EngineOutput
from server.choice import Choice, Piece
from server.convert import PreparedRequest
from server.errors import ApiError, body_of
from server.parsers import Kind
from server.renderers.text_events import TextEvents
from server.schema.common import Timings

SAMPLE_TEXT = "\0text\0"
_SAMPLE_JSON = orjson.dumps(SAMPLE_TEXT)[1:-1]


class Event(NamedTuple):
    """One server-sent event: a JSON object and, where the API wants one, the event's name."""

    payload: dict[str, Any]
    name: str | None = None

    def encode(self) -> bytes:
        """The bytes of the event."""
        head = b"" if self.name is None else b"event: " + self.name.encode() + b"\n"
        return head + b"data: " + orjson.dumps(self.payload) + b"\n\n"

    def around_sample(self) -> list[bytes]:
        """What stands around `SAMPLE_TEXT` in the bytes of an event; another JSON text may join the parts."""
        return self.encode().split(_SAMPLE_JSON)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of an answer so far. `num_cached` are those of the prompt that the prefix cache had."""

    num_prompt: int
    num_cached: int
    num_completion: int
    num_reasoning: int

    @property
    def num_tokens(self) -> int:
        """Prompt and answer together."""
        return self.num_prompt + self.num_completion


class Renderer(ABC):
    """One answer of one endpoint. `respond` either sends what `stream` returns, or calls `take` and at last `body`."""

    end_marker = b""
    """Sent after the last event of a stream that did not fail."""
    keep_alive = b": keep-alive\n\n"
    """Sent while a stream is silent, so that no proxy takes it for dead. Readers of events skip this comment."""

    def __init__(self, prepared: PreparedRequest, *, model: str) -> None:
        self.prepared = prepared
        self.model = model
        self.choices = [prepared.make_choice(index) for index in range(len(prepared.requests))]
        self.timings: Callable[[], Timings] | None = None
        """Where the time went so far; set by who measures it."""
        self._taken = [_JoinedPieces() for _ in self.choices]
        self.text_events: Sequence[TextEvents] = [TextEvents(prepared.token_texts) for _ in self.choices]
        """A short cut of `stream` for nearly all outputs of each choice."""

    @abstractmethod
    def begin(self) -> Sequence[Event]:
        """Events before all others, sent with the first output, so that an earlier error has its own status.

        It is asked again at the next output if it has none and the first output made none either.
        """

    @abstractmethod
    def pieces(self, index: int, pieces: Sequence[Piece]) -> Sequence[Event]:
        """Events for the new pieces of a choice; if its `finish_reason` is set, these are its last ones.

        There are no pieces if an output brought no text.
        """

    @abstractmethod
    def end(self) -> Sequence[Event]:
        """Events after all choices are finished."""

    @abstractmethod
    def fold(self, events: Iterable[Event]) -> dict[str, Any]:
        """The whole answer that a client puts together out of all events."""

    def failure(self, error: ApiError, request_id: str) -> Sequence[Event]:
        """The last events of a stream that fails after it has begun; `request_id` is that of the `X-Request-Id`."""
        return [Event(body_of(error))]

    async def keep(self) -> None:  # noqa: B027  most answers are not stored
        """Store the answer, if that was asked for. Called after `end`, before its events are sent."""

    def encode(self, index: int, pieces: Sequence[Piece]) -> bytes:
        """`pieces` as bytes. A renderer overrides it where text can be encoded faster."""
        return b"".join([event.encode() for event in self.pieces(index, pieces)])

    def around_text(self, index: int, kind: Kind) -> Sequence[bytes] | None:
        """What stands around the text in the encoded event of a token that adds to the content or the reasoning.

        None if such events differ in more than their text. Asked after each output that may have changed it.
        """
        return None

    def stream(self, index: int, output: EngineOutput) -> bytes:
        """Take in an output of one request and return the encoded events to send now."""
        texts = self.text_events[index]
        if (event := texts.take(output)) is not None:
            return event
        choice = self.choices[index]
        if choice.finish_reason is not None:
            return b""
        data = self.encode(index, choice.push(output))
        kind = choice.text_kind
        around = None if kind is None else self.around_text(index, kind)
        if kind is None or around is None:
            texts.close()
        else:
            choice.begin_text(kind)
            texts.open(around, choice.token_ids, choice.num_cached_tokens)
        return data

    def take(self, index: int, output: EngineOutput) -> None:
        """Take in an output of one request for `body`."""
        self._taken[index].add(self.choices[index].push(output))

    def body(self) -> dict[str, Any]:
        """The whole answer, once all choices are finished."""
        middle = [event for index, taken in enumerate(self._taken) for event in self.pieces(index, taken.pieces())]
        return self.fold([*self.begin(), *middle, *self.end()])

    def is_finished(self, index: int) -> bool:
        """True when no more text of this choice can come."""
        return self.choices[index].finish_reason is not None

    @property
    def counts(self) -> TokenCounts:
        """Tokens so far. A prompt counts once, however many choices it has."""
        firsts = self.choices[:: self.prepared.num_choices]
        return count_tokens(self.prepared.num_prompt_tokens, self.choices, firsts)


class _JoinedPieces:
    """Pieces of one choice, in which neighbours of the same part are one piece. Costs the same for each token."""

    def __init__(self) -> None:
        self._parts: list[tuple[Piece, list[str], list[Any]]] = []

    def add(self, pieces: Sequence[Piece]) -> None:
        """Add the next pieces."""
        for piece in pieces:
            if self._parts and piece.name is None:
                last, texts, tokens = self._parts[-1]
                if last.name is None and (last.kind, last.call) == (piece.kind, piece.call):
                    texts.append(piece.text)
                    tokens += piece.tokens
                    continue
            self._parts.append((piece, [piece.text], list(piece.tokens)))

    def pieces(self) -> list[Piece]:
        """The joined pieces."""
        return [Piece(p.kind, "".join(texts), tokens, p.call, p.name) for p, texts, tokens in self._parts]


def count_tokens(num_prompt: int, choices: Sequence[Choice], firsts: Sequence[Choice]) -> TokenCounts:
    """Tokens of `choices`. `firsts` has the first choice of each prompt: the cached tokens of a prompt count once."""
    return TokenCounts(
        num_prompt=num_prompt,
        num_cached=min(sum(choice.num_cached_tokens for choice in firsts), num_prompt),
        num_completion=sum(choice.num_tokens for choice in choices),
        num_reasoning=sum(choice.num_reasoning_tokens for choice in choices),
    )
