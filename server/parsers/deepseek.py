"""`DeepSeekParser`: DeepSeek-V3, R1 and V3.1 output into reasoning, content and tool calls. Lenient, never raises.

`<think>` reasoning `</think>` content, then `<｜tool▁calls▁begin｜>` and calls in one of two spellings:

    V3, R1   <｜tool▁call▁begin｜>function<｜tool▁sep｜>name, line break, a ```json block<｜tool▁call▁end｜>
    V3.1     <｜tool▁call▁begin｜>name<｜tool▁sep｜>arguments<｜tool▁call▁end｜>

All markers are tokens of their own. Line breaks right after a marker are layout and dropped.
"""

import enum
import re
from collections.abc import Sequence

from server.parsers.base import Event, Kind, TokenBytes, is_blank

REQUIRED = frozenset({"<think>", "</think>"})
END_OF_TURN = ("<｜end▁of▁sentence｜>",)
_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(rb"\s*([^\n]*?)\s*\n(?:\s*```(?:json)?[ \t]*\n)?(.*?)(?:\s*```\s*)?", re.DOTALL)

_Piece = tuple[int, bytes]


class _At(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    BETWEEN_CALLS = enum.auto()
    CALL_HEAD = enum.auto()
    FENCED_CALL = enum.auto()
    CALL_ARGUMENTS = enum.auto()
    DONE = enum.auto()


class DeepSeekParser:
    """One turn of the assistant. It starts inside the reasoning if the prompt ends with `<think>`."""

    def __init__(self, tokenizer: TokenBytes, prompt_ids: Sequence[int] = ()) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._marker = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
        self._position = -1
        self._at = _At.REASONING if self._ends_with_think(prompt_ids) else _At.CONTENT
        self._skips_layout = self._at is _At.REASONING
        self._num_calls = 0
        self._held: list[_Piece] = []  # the call at hand, as long as its spelling is not known

    def feed(self, token_id: int) -> list[Event]:
        """Events of one token."""
        self._position += 1
        if self._at is _At.DONE:
            return []
        marker = self._marker.get(token_id)
        return self._on_text(self._token_bytes(token_id)) if marker is None else self._on_marker(marker)

    def finish(self) -> list[Event]:
        """A call that was cut short is given as far as it goes."""
        events = self._end_call(is_cut=True)
        self._at = _At.DONE
        return events

    def _ends_with_think(self, prompt_ids: Sequence[int]) -> bool:
        for token_id in reversed(prompt_ids):
            if token_id in self._marker:
                return self._marker[token_id] == "<think>"
            if not is_blank(self._token_bytes(token_id)):
                return False
        return False

    def _on_text(self, data: bytes) -> list[Event]:
        if self._at in (_At.CALL_HEAD, _At.FENCED_CALL):
            self._held.append((self._position, data))
            return []
        if self._at is _At.BETWEEN_CALLS:
            return []
        if self._skips_layout:
            data = data.lstrip(b"\r\n")
            if not data:
                return []
            self._skips_layout = False
        if self._at is _At.CALL_ARGUMENTS:
            return [Event(Kind.TOOL_CALL, data, self._position, self._num_calls - 1)]
        return [Event(Kind.REASONING if self._at is _At.REASONING else Kind.CONTENT, data, self._position)]

    def _on_marker(self, marker: str) -> list[Event]:
        events: list[Event] = []
        if marker in (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, *END_OF_TURN):
            events = self._end_call(is_cut=marker in END_OF_TURN)
        if marker == _CALL_SEP:
            return self._on_separator()
        if marker == "<think>":
            self._at, self._skips_layout = (_At.REASONING, True) if self._at is _At.CONTENT else (self._at, False)
        elif marker == "</think>" and self._at is _At.REASONING:
            self._at, self._skips_layout = _At.CONTENT, True
        elif marker in (_CALLS_BEGIN, _CALL_END):
            self._at = _At.BETWEEN_CALLS
        elif marker == _CALL_BEGIN:
            self._at = _At.CALL_HEAD
        elif marker == _CALLS_END:
            self._at, self._skips_layout = _At.CONTENT, True
        elif marker in END_OF_TURN:
            self._at = _At.DONE
        return events

    def _on_separator(self) -> list[Event]:
        if self._at is not _At.CALL_HEAD:
            return []
        head = b"".join(data for _, data in self._held).strip()
        self._held = []
        if head == b"function":
            self._at = _At.FENCED_CALL
            return []
        self._at, self._skips_layout = _At.CALL_ARGUMENTS, True
        return [self._open_call(head)]

    def _open_call(self, name: bytes) -> Event:
        self._num_calls += 1
        text = name.decode("utf-8", errors="replace")
        return Event(Kind.TOOL_CALL, b"", call=self._num_calls - 1, name=text)

    def _end_call(self, *, is_cut: bool) -> list[Event]:
        """A fenced call is read when it is complete; its name and its fence are not arguments."""
        held, self._held = self._held, []
        if self._at is _At.CALL_ARGUMENTS and self._skips_layout and not is_cut:
            return [Event(Kind.TOOL_CALL, b"{}", call=self._num_calls - 1)]
        if self._at is not _At.FENCED_CALL:
            return []
        whole = b"".join(data for _, data in held)
        found = _FENCED.fullmatch(whole)
        if found is None or not found[1]:
            return []
        opened = self._open_call(found[1])
        arguments = found[2] or (b"" if is_cut else b"{}")
        return [opened, Event(Kind.TOOL_CALL, arguments, held[-1][0], self._num_calls - 1)]
