"""`DeepSeekParser`: DeepSeek-V3, R1 and V3.1 output into reasoning, content and tool calls. Lenient, never raises.

`<think>` reasoning `</think>` content, then `<｜tool▁calls▁begin｜>` and calls in one of two spellings:

    V3, R1   <｜tool▁call▁begin｜>function<｜tool▁sep｜>name, line break, arguments<｜tool▁call▁end｜>
    V3.1     <｜tool▁call▁begin｜>name<｜tool▁sep｜>arguments<｜tool▁call▁end｜>

Arguments may stand in a ```json block. "function" before arguments that begin with a brace is a V3.1 tool of that name.
All markers are tokens of their own. Line breaks right after a marker are layout and dropped; those that follow a
`</think>` of the prompt are content. A call to a function that the request did not offer, and text around calls, are
content. User messages and tool results that the model invents are dropped: they are not the assistant's words.
"""

import enum
import re
from collections.abc import Sequence

from loaders.markers import DeepSeek
from server.parsers.base import BytePiece, Event, Kind, TokenBytes, between, is_blank, joined, stripped, text_of

REQUIRED = frozenset({DeepSeek.THINK, DeepSeek.THINK_END})
END_OF_TURN = (DeepSeek.END,)
_CALL_BEGIN, _CALL_SEP, _CALL_END = DeepSeek.CALL_BEGIN, DeepSeek.CALL_SEP, DeepSeek.CALL_END
_CALLS_BEGIN, _CALLS_END = DeepSeek.CALLS_BEGIN, DeepSeek.CALLS_END
_FOREIGN_BEGIN = (DeepSeek.USER, DeepSeek.OUTPUTS_BEGIN, DeepSeek.OUTPUT_BEGIN)
_FOREIGN_END = (DeepSeek.ASSISTANT, DeepSeek.OUTPUTS_END, DeepSeek.OUTPUT_END)
_NAME_LINE = re.compile(rb"\s*([^\n]+?)\s*(?:\n|$)(.*)", re.DOTALL)
_FENCE = re.compile(rb"\s*```(?:json)?[ \t]*(?:\n|$)(.*?)(?:\s*```\s*)?", re.DOTALL)


class _At(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    FOREIGN = enum.auto()
    BETWEEN_CALLS = enum.auto()
    CALL_HEAD = enum.auto()
    CALL_BODY = enum.auto()  # after the separator, until the spelling is known
    HELD_CALL = enum.auto()  # read once complete: V3's spelling, or arguments in a block
    CALL_ARGUMENTS = enum.auto()
    DONE = enum.auto()


_IN_CALL = (_At.CALL_HEAD, _At.CALL_BODY, _At.HELD_CALL, _At.CALL_ARGUMENTS)


class DeepSeekParser:
    """One turn of the assistant. It starts inside the reasoning if the prompt ends with `<think>`."""

    def __init__(
        self, tokenizer: TokenBytes, prompt_ids: Sequence[int] = (), tool_names: frozenset[str] = frozenset()
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._marker = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
        self._tool_names = tool_names
        self._position = -1
        self._at = _At.REASONING if self._ends_with_think(prompt_ids) else _At.CONTENT
        self._skips_layout = self._at is _At.REASONING
        self._has_content = False
        self._num_calls = 0
        self._is_declared = False  # of the current call
        self._head: list[BytePiece] = []
        self._held: list[BytePiece] = []
        self.num_undeclared_calls = 0

    def feed(self, token_id: int) -> list[Event]:
        """Events of one token."""
        self._position += 1
        if self._at is _At.DONE:
            return []
        marker = self._marker.get(token_id)
        return self._on_text(self._token_bytes(token_id)) if marker is None else self._on_marker(marker)

    @property
    def text_kind(self) -> Kind | None:
        """Reasoning or content, once its first text has come."""
        if self._skips_layout:
            return None
        if self._at is _At.REASONING:
            return Kind.REASONING
        return Kind.CONTENT if self._at is _At.CONTENT and self._has_content else None

    def finish(self) -> list[Event]:
        """A call that was cut short is given as far as it goes."""
        events = self._end_call(is_cut=True)
        self._at = _At.DONE
        return events

    def _ends_with_think(self, prompt_ids: Sequence[int]) -> bool:
        for token_id in reversed(prompt_ids):
            if token_id in self._marker:
                return self._marker[token_id] == DeepSeek.THINK
            if not is_blank(self._token_bytes(token_id)):
                return False
        return False

    def _on_text(self, data: bytes) -> list[Event]:
        if self._at in (_At.CALL_HEAD, _At.CALL_BODY, _At.HELD_CALL):
            self._held.append((self._position, data))
            return self._on_body() if self._at is _At.CALL_BODY else []
        if self._at is _At.FOREIGN or (self._at is _At.BETWEEN_CALLS and is_blank(data)):
            return []
        if self._at is _At.BETWEEN_CALLS:
            self._at = _At.CONTENT
            return self._content_line([(self._position, data)])
        return self._in_part(data)

    def _in_part(self, data: bytes) -> list[Event]:
        """Text of the reasoning, the content or a call's arguments."""
        if self._skips_layout:
            data = data.lstrip(b"\r\n")
            if not data:
                return []
            self._skips_layout = False
        if self._at is _At.CALL_ARGUMENTS:
            return [self._argument(data, self._position)]
        if self._at is _At.REASONING:
            return [Event(Kind.REASONING, data, self._position)]
        self._has_content = True
        return [Event(Kind.CONTENT, data, self._position)]

    def _on_marker(self, marker: str) -> list[Event]:
        events: list[Event] = []
        if marker in (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, *_FOREIGN_BEGIN, *END_OF_TURN):
            events = self._end_call(is_cut=marker in END_OF_TURN)
        was_in_call = self._at in _IN_CALL
        if marker == _CALL_SEP and self._at is _At.CALL_HEAD:
            self._head, self._held = stripped(self._held), []
            self._at = _At.CALL_BODY
        elif marker == DeepSeek.THINK and self._at is _At.CONTENT:
            self._at, self._skips_layout = _At.REASONING, True
        elif marker == DeepSeek.THINK_END and self._at is _At.REASONING:
            self._at, self._skips_layout = _At.CONTENT, True
        elif marker == _CALLS_BEGIN or (marker == _CALL_END and was_in_call):
            self._at, self._skips_layout = _At.BETWEEN_CALLS, False
        elif marker == _CALL_BEGIN:
            self._at = _At.CALL_HEAD
        elif (marker == _CALLS_END and (was_in_call or self._at is _At.BETWEEN_CALLS)) or (
            marker in _FOREIGN_END and self._at is _At.FOREIGN
        ):
            self._at, self._skips_layout = _At.CONTENT, True
        elif marker in _FOREIGN_BEGIN:
            self._at = _At.FOREIGN
        elif marker in END_OF_TURN:
            self._at = _At.DONE
        return events

    def _on_body(self) -> list[Event]:
        """Passes plain arguments on as they arrive."""
        body = joined(self._held)
        begun = body.lstrip()[:1]
        if begun == b"`" or (begun and joined(self._head) == b"function" and begun not in (b"{", b"[")):
            self._at = _At.HELD_CALL
        if not begun or self._at is _At.HELD_CALL:
            return []
        pieces, self._held = between(self._held, len(body) - len(body.lstrip())), []
        self._at, self._skips_layout = _At.CALL_ARGUMENTS, False
        return [*self._open_call(self._head), *(self._argument(data, position) for position, data in pieces)]

    def _open_call(self, name: list[BytePiece]) -> list[Event]:
        text = text_of(name)
        self._is_declared = text in self._tool_names
        if self._is_declared:
            self._num_calls += 1
            return [Event(Kind.TOOL_CALL, b"", call=self._num_calls - 1, name=text)]
        self.num_undeclared_calls += 1
        return self._content_line([*name, (-1, b" ")]) if name else []

    def _argument(self, data: bytes, position: int) -> Event:
        if self._is_declared:
            return Event(Kind.TOOL_CALL, data, position, self._num_calls - 1)
        return Event(Kind.CONTENT, data, position)

    def _content_line(self, pieces: list[BytePiece]) -> list[Event]:
        """Content that begins a line."""
        joint = [Event(Kind.CONTENT, b"\n")] if self._has_content else []
        self._has_content = True
        return [*joint, *(Event(Kind.CONTENT, data, position) for position, data in pieces)]

    def _end_call(self, *, is_cut: bool) -> list[Event]:
        """Read what was held back of the current call."""
        held, self._held = self._held, []
        if self._at is _At.CALL_HEAD:
            return self._text_of_call(held, is_cut=is_cut)
        if self._at not in (_At.CALL_BODY, _At.HELD_CALL):
            return []
        name, body = self._head, joined(held)
        if joined(name) == b"function" and not is_blank(body) and not body.lstrip().startswith(b"`"):
            line = _NAME_LINE.fullmatch(body)
            if line is None or (b"\n" not in body.strip() and line[1].decode(errors="replace") not in self._tool_names):
                return self._text_of_call(held, is_cut=is_cut)
            name, held, body = between(held, *line.span(1)), between(held, *line.span(2)), line[2]
        fenced = _FENCE.fullmatch(body)
        arguments = between(held, *fenced.span(1)) if fenced else between(held, len(body) - len(body.lstrip()))
        if is_blank(joined(arguments)):
            arguments = [] if is_cut else [(-1, b"{}")]
        return [*self._open_call(name), *(self._argument(data, position) for position, data in arguments)]

    def _text_of_call(self, pieces: list[BytePiece], *, is_cut: bool) -> list[Event]:
        """Text of a call without a name is content, unless it is a name that was cut short."""
        text = stripped(pieces)
        names = (b"function", *(name.encode() for name in self._tool_names))
        if not text or (is_cut and any(name.startswith(joined(text)) for name in names)):
            return []
        return self._content_line(text)
