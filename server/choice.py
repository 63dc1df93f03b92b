"""`Choice`: turns the engine outputs of one choice into visible pieces. Streamed or not, the pieces are the same.

The parser sorts tokens into reasoning, content and tool calls; then bytes become whole characters, and content passes
the stop matcher. Stop strings match content only, never reasoning, tool calls or markup.

A part ends where another one begins: what was held back of it is shown first, so a character or a stop string that is
not complete by then never will be.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.types import EngineOutput, TokenLogprobs
from server.detokenizer import TextStream, TextToken
from server.errors import ApiError, BadRequest, EngineFailed, TooManyRequests
from server.parsers import Event, Kind, Parser
from server.schema.common import FinishReason
from server.stops import StopMatcher


@dataclass(slots=True)
class Piece:
    """New text of one part of the answer. `tokens` (content only) are those whose text is now wholly visible."""

    kind: Kind
    text: str
    tokens: Sequence[TextToken] = ()
    call: int = -1
    name: str | None = None  # set in the first piece of a tool call


class Choice:
    """Feed it every output of one engine request; `finish_reason` is set once no more text can come."""

    def __init__(
        self,
        parser: Parser,
        *,
        stops: Sequence[str] = (),
        stop_ids: Collection[int] = (),
        max_calls: int | None = None,
        hides_all: bool = False,
        keeps_tokens: bool = True,
        min_tokens: int = 0,
        shows_stop: bool = False,
    ) -> None:
        """`stop_ids` are ordinary tokens that end the answer and are no part of it.

        The answer ends after `max_calls` tool calls. With `hides_all` no generated token is shown or counted: the
        request only scores its prompt, but the engine always generates at least one token. `keeps_tokens` is False for
        an answer without log-probabilities, whose pieces need no tokens. Stop strings match no text of the first
        `min_tokens` tokens. With `shows_stop` the stop string or ordinary token that ends the answer is part of it.
        """
        self._parser = parser
        self._stops = StopMatcher(stops, shows_stop=shows_stop)
        self._stop_ids = frozenset() if shows_stop else frozenset(stop_ids)
        self._max_calls = max_calls
        self._hides_all = hides_all
        self._min_tokens = min_tokens
        self.keeps_tokens = keeps_tokens
        self._takes_text = not (stops or hides_all or keeps_tokens)
        self._content = TextStream()
        self._num_shown = 0  # characters of content that was pushed
        self._reasoning = TextStream()
        self._calls: list[TextStream] = []
        self._open: tuple[Kind, int] | None = None  # the part that pushed text belongs to: its kind and call
        self._logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.finish_reason: FinishReason | None = None
        self.token_ids: list[int] = []  # that count
        self._num_reasoning_tokens = 0  # that were pushed
        self._num_direct_before = {Kind.CONTENT: 0, Kind.REASONING: 0}
        self._direct_kind: Kind | None = None
        self._direct_start = 0
        self.num_cached_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Generated tokens that count."""
        return len(self.token_ids)

    @property
    def is_empty(self) -> bool:
        """Tokens were generated, and the client got neither content nor a tool call."""
        return self.num_tokens > 0 and not (self._num_shown or self._calls or self._num_direct(Kind.CONTENT))

    @property
    def num_reasoning_tokens(self) -> int:
        """Generated tokens that are reasoning."""
        return self._num_reasoning_tokens + self._num_direct(Kind.REASONING)

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.matched

    @property
    def num_undeclared_calls(self) -> int:
        """Calls to functions that the request did not offer; they are content."""
        return self._parser.num_undeclared_calls

    @property
    def text_kind(self) -> Kind | None:
        """The part to which a token of whole characters now adds its text, and does nothing else.

        None if such a token may do more. Only `push` changes this.
        """
        kind = self._parser.text_kind if self._takes_text and self.finish_reason is None else None
        stream = self._content if kind is Kind.CONTENT else self._reasoning
        return kind if (kind, -1) == self._open and stream.is_whole else None

    def begin_text(self, kind: Kind) -> None:
        """Until the next `push`, the caller shows the texts of such tokens, and adds the tokens to `token_ids`."""
        self._end_text()
        self._direct_kind, self._direct_start = kind, len(self.token_ids)

    def _num_direct(self, kind: Kind) -> int:
        """Tokens of this part that were never pushed."""
        num_new = len(self.token_ids) - self._direct_start if kind is self._direct_kind else 0
        return self._num_direct_before[kind] + num_new

    def _end_text(self) -> None:
        if self._direct_kind is not None:
            self._num_direct_before[self._direct_kind] = self._num_direct(self._direct_kind)
            self._direct_kind = None

    def push(self, output: EngineOutput) -> list[Piece]:
        """The pieces that became visible; neighbours of the same part are one piece.

        Raises:
            BadRequest, TooManyRequests, EngineFailed: the engine ended the request without an answer.
        """
        self._end_text()
        if self.finish_reason is not None:
            return []
        if output.finish_reason in ("error", "abort"):
            raise _failure(output)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        pieces: list[Piece] = []
        if self._hides_all:
            self.finish_reason = "length" if output.token_ids or output.finish_reason else None
            return pieces
        self._logprobs += output.logprobs or []
        for token_id in output.token_ids:
            self.token_ids.append(token_id)
            if output.stop_reason == token_id in self._stop_ids:
                self._show([Event(Kind.CONTENT, b"", self.num_tokens - 1)], pieces)
            else:
                self._show(self._parser.feed(token_id), pieces)
            if self.finish_reason is not None:
                return pieces
        if output.finish_reason is not None:
            self._finish(output, pieces)
        return pieces

    def logprobs_at(self, position: int) -> TokenLogprobs | None:
        """Log-probabilities of a generated token, if they were asked for."""
        return self._logprobs[position] if position < len(self._logprobs) else None

    def _show(self, events: Sequence[Event], pieces: list[Piece]) -> None:
        for kind, data, position, call, name in events:
            if (kind, call) != self._open and (data or name is not None):
                self._end_part(pieces)
                if self.finish_reason is not None:
                    return
                self._open = kind, call
            if kind is Kind.CONTENT:
                self._show_content(self._content.feed(data, position if self.keeps_tokens else -1), pieces)
                if not data and position >= 0:  # a token without text: clients that count events see it too
                    _append(pieces, kind, "", keeps_empty=True)
            elif kind is Kind.REASONING:
                self._num_reasoning_tokens += position >= 0
                _append(pieces, kind, self._reasoning.feed(data))
            elif name is None:
                _append(pieces, kind, self._calls[call].feed(data), call=call)
            elif self._max_calls is not None and call >= self._max_calls:
                self.finish_reason = "tool_calls"
            else:
                self._calls.append(TextStream())
                pieces.append(Piece(Kind.TOOL_CALL, "", call=call, name=name))
            if self.finish_reason is not None:
                return

    def _show_content(self, text: str, pieces: list[Piece]) -> None:
        is_early = self._min_tokens and self.num_tokens <= self._min_tokens
        shown = text if is_early else self._stops.feed(text)
        self._num_shown += len(shown)
        if self._stops.matched is not None:
            self.finish_reason = "stop"
            _append(pieces, Kind.CONTENT, shown, self._content.cut(self._num_shown))
        else:
            _append(pieces, Kind.CONTENT, shown, self._content.take(self._num_shown))

    def _end_part(self, pieces: list[Piece]) -> None:
        """Show what is held back of the open part. The text that this completes may still end with a stop string."""
        kind, call = self._open or (Kind.CONTENT, -1)
        if kind is Kind.REASONING:
            _append(pieces, kind, self._reasoning.flush())
        elif kind is Kind.TOOL_CALL:
            _append(pieces, kind, self._calls[call].flush(), call=call)
        else:
            self._show_content(self._content.flush(), pieces)
            held = self._stops.flush()
            self._num_shown += len(held)
            _append(pieces, kind, held, self._content.take(self._num_shown))

    def _finish(self, output: EngineOutput, pieces: list[Piece]) -> None:
        self._show(self._parser.finish(), pieces)
        if self.finish_reason is None:
            self._end_part(pieces)
        if self.finish_reason is None:
            is_cut = output.finish_reason == "length"
            self.finish_reason = "length" if is_cut else "tool_calls" if self._calls else "stop"


def _append(
    pieces: list[Piece], kind: Kind, text: str, tokens: Sequence[TextToken] = (), *, call: int = -1,
    keeps_empty: bool = False,
) -> None:  # fmt: skip
    """Add a piece, joined to the last one if that is of the same part; empty ones are dropped unless `keeps_empty`."""
    if not text and not tokens and not keeps_empty:
        return
    last = pieces[-1] if pieces else None
    if last is not None and last.name is None and (last.kind, last.call) == (kind, call):
        last.text += text
        last.tokens = [*last.tokens, *tokens]
    else:
        pieces.append(Piece(kind, text, tokens, call))


def _failure(output: EngineOutput) -> ApiError:
    """The error for a request that the engine refused or gave up: a 400 if it names a field."""
    if output.error is not None and output.error_param is not None:
        return BadRequest(output.error, param=output.error_param)
    if output.overloaded:
        return TooManyRequests(output.error or "too many requests are waiting: try again later")
    return EngineFailed(output.error or "the engine ended this request before it was finished")
