"""`HarmonyParser`: GPT-OSS output into reasoning, content and tool calls, token by token. Lenient, never raises.

A message is `<|start|>` header `<|message|>` body, ended by `<|end|>`; `<|return|>` and `<|call|>` end the whole turn,
and what follows them is ignored. What a header may say is in `harmony_header`.

    recipient is a declared tool, with or without `functions.`    tool call, on any channel
    any other recipient but user, assistant, all                  content, counted as an undeclared call
    analysis                                                      reasoning
    final, commentary (a preamble, meant for the user), unknown   content

Messages of other roles, such as an invented tool result, are dropped: they are not the assistant's words. All other
text but markup is shown. `<|start|>` or `<|channel|>` always begins a new header; markers that make no sense are
skipped; text in a header without `<|message|>` is the body. Loose text (outside of messages, in a header that has a
body, in any header before the recipient, or in a body whose header names no channel) is reasoning, or content if the
turn ends with neither content nor a tool call. Several messages of the same kind are joined by a line break.
"""

import enum
import logging
from collections.abc import Sequence

from loaders.markers import Harmony
from server.parsers.base import BytePiece, Event, Kind, TokenBytes, between, is_blank, joined, text_of
from server.parsers.harmony_header import PROMPT_POSITION, Header, Part, is_begun_header_word, without_header_words

log = logging.getLogger(__name__)

REQUIRED = frozenset({Harmony.START, Harmony.CHANNEL, Harmony.MESSAGE, Harmony.END})
END_OF_TURN = (Harmony.RETURN, Harmony.CALL, Harmony.END_OF_TEXT)
_MAX_EARLY_BYTES = 64  # a text this short before a second `<|message|>` may still be a header
_LINE_BREAK: BytePiece = (-1, b"\n")  # that we add
_FUNCTIONS = "functions."
_TO_PEOPLE = frozenset({"user", "assistant", "all"})


class _At(enum.Enum):
    """Where in the syntax the parser stands."""

    OUTSIDE = enum.auto()
    HEADER = enum.auto()
    BODY = enum.auto()
    DONE = enum.auto()


class HarmonyParser:
    """One turn of the assistant. The last, unfinished message of the prompt decides the first state."""

    def __init__(
        self, tokenizer: TokenBytes, prompt_ids: Sequence[int] = (), tool_names: frozenset[str] = frozenset()
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._marker = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
        self._tool_names = tool_names
        self._position = PROMPT_POSITION
        self._at = _At.HEADER
        self._header = Header()
        self._kind: Kind | None = None  # of the body; None: loose
        self._is_foreign = False  # the body pretends to be somebody else's
        self._body_is_empty = True
        self._seen_kinds: set[Kind] = set()
        self._num_calls = 0
        self._loose: list[BytePiece] = []
        self.num_undeclared_calls = 0
        self._opened = self._prime(prompt_ids, tokenizer.special_tokens[Harmony.START])

    def feed(self, token_id: int) -> list[Event]:
        """Events of one token."""
        self._position += 1
        opened, self._opened = self._opened, []
        return [*opened, *self._advance(token_id)]

    @property
    def text_kind(self) -> Kind | None:
        """That of a body of content or reasoning that has begun."""
        if self._at is not _At.BODY or self._body_is_empty or self._opened or self._is_foreign:
            return None
        return None if self._kind is Kind.TOOL_CALL else self._kind

    def finish(self) -> list[Event]:
        """Release what a header held back, and the loose text."""
        events = self._close(is_cut=True) if self._at is not _At.DONE else []
        self._at = _At.DONE
        if self._num_calls or Kind.CONTENT in self._seen_kinds:
            return [*events, *self._flush_loose()]
        loose = without_header_words(self._take_loose())
        if is_blank(joined(loose)):
            return events
        log.warning("model output has no readable final message; showing its text without markup")
        return [*events, *(Event(Kind.CONTENT, data, position) for position, data in loose)]

    def _prime(self, prompt_ids: Sequence[int], start_id: int) -> list[Event]:
        """Replay the prompt from its last `<|start|>`, so that an answer may begin inside a header or a body.

        Returns the event that opens a call whose arguments the answer continues.
        """
        first = next((i for i in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[i] == start_id), len(prompt_ids))
        events = [event for token_id in prompt_ids[first:] for event in self._advance(token_id)]
        self._position = -1
        self._loose.clear()
        self._seen_kinds.clear()
        if self._at is _At.BODY:
            return [event for event in events if event.name is not None]
        if self._at is not _At.HEADER:
            self._header, self._at = Header(), _At.HEADER
        self._num_calls = self.num_undeclared_calls = 0
        return []

    def _advance(self, token_id: int) -> list[Event]:
        if self._at is _At.DONE:
            return []
        marker = self._marker.get(token_id)
        return self._on_text(self._token_bytes(token_id)) if marker is None else self._on_marker(marker)

    def _on_text(self, data: bytes) -> list[Event]:
        if self._at is _At.HEADER:
            self._header.add(self._position, data)
            return []
        if self._at is _At.OUTSIDE:
            self._loose.append((self._position, data))
            return []
        return self._in_body(self._position, data)

    def _in_body(self, position: int, data: bytes) -> list[Event]:
        if self._is_foreign:
            return []
        if self._kind is None:
            self._loose.append((position, data))
            return []
        call = self._num_calls - 1 if self._kind is Kind.TOOL_CALL else -1
        if not self._body_is_empty:
            return [Event(self._kind, data, position, call)]
        events = []
        if self._kind is not Kind.TOOL_CALL and self._kind in self._seen_kinds:
            events.append(Event(self._kind, b"\n"))
        self._body_is_empty = False
        self._seen_kinds.add(self._kind)
        return [*events, Event(self._kind, data, position, call)]

    def _on_marker(self, marker: str) -> list[Event]:
        if marker in END_OF_TURN:
            events = self._close(is_call=marker == Harmony.CALL)
            self._at = _At.DONE
            return events
        if marker == Harmony.START:
            events = self._close()
            self._header, self._at = Header(), _At.HEADER
            return events
        if marker == Harmony.CHANNEL:
            return self._on_channel()
        if marker == Harmony.MESSAGE:
            return self._on_message()
        if marker == Harmony.CONSTRAIN and self._at is _At.HEADER:
            self._header.begin(Part.CONSTRAIN)
        elif marker == Harmony.END and self._at is _At.BODY:
            events = self._close()
            self._at = _At.OUTSIDE
            self._break_loose()
            return events
        return []

    def _on_channel(self) -> list[Event]:
        events: list[Event] = []
        is_repeated = self._at is _At.HEADER and self._header.part is not Part.ROLE
        if self._at is not _At.HEADER or (is_repeated and self._header.has_text_at_hand):
            events = self._close()
            self._header, self._at = Header(), _At.HEADER
        self._header.begin(Part.CHANNEL)
        return events

    def _on_message(self) -> list[Event]:
        if self._at is _At.BODY and self._kind is None and self._loose_is_a_header():
            # The first marker came too early: what looked like the body is the header.
            self._header = Header()
            self._header.begin(Part.CHANNEL)
            for position, data in self._loose:
                self._header.add(position, data)
            self._loose = []
        elif self._at is not _At.HEADER:
            return []
        stray = [] if self._header.is_foreign else self._header.stray_text()
        return self._open_body(stray, has_body=True)

    def _open_body(self, stray: list[BytePiece], *, has_body: bool) -> list[Event]:
        """The header is complete: decide whose message it is and of what kind."""
        self._at, self._body_is_empty = _At.BODY, True
        self._break_loose()
        self._loose += stray
        self._is_foreign = self._header.is_foreign
        self._kind = None
        if self._is_foreign:
            return []
        named, channel = self._header.recipient(has_body=has_body), self._header.channel(has_body=has_body)
        if name := self._declared(named):
            self._kind = Kind.TOOL_CALL
            self._num_calls += 1
            opened = Event(Kind.TOOL_CALL, b"", call=self._num_calls - 1, name=name)
            return [*self._flush_loose(), opened]
        recipient = text_of(named)
        is_call = recipient.startswith(_FUNCTIONS) or channel != "final"
        if recipient and is_call and recipient not in _TO_PEOPLE:
            self._kind = Kind.CONTENT
            self.num_undeclared_calls += 1
            name_pieces = between(named, len(_FUNCTIONS)) if recipient.startswith(_FUNCTIONS) else named
            events = self._flush_loose()
            for position, data in [*name_pieces, (-1, b" ")]:
                events += self._in_body(position, data)
            return events
        if channel == "analysis":
            self._kind = Kind.REASONING
        elif channel or (has_body and self._header.names_channel):
            self._kind = Kind.CONTENT
        else:
            self._break_loose()
            return []
        return self._flush_loose()

    def _declared(self, named: list[BytePiece]) -> str | None:
        """The declared tool that a recipient means."""
        names = (text_of(named).removeprefix(_FUNCTIONS), text_of(named))
        return next((name for name in names if name in self._tool_names), None)

    def _break_loose(self) -> None:
        """Begin a line of loose text, so that texts from two places do not run together."""
        if self._loose and self._loose[-1] != _LINE_BREAK:
            self._loose.append(_LINE_BREAK)

    def _take_loose(self) -> list[BytePiece]:
        """All of it, without the line breaks that we added at its end."""
        loose, self._loose = self._loose, []
        while loose and loose[-1] == _LINE_BREAK:
            loose.pop()
        return loose

    def _loose_is_a_header(self) -> bool:
        """Nothing but header words, and at most one other word."""
        text = joined(self._loose)
        return len(text) <= _MAX_EARLY_BYTES and len(joined(without_header_words(self._loose)).split()) <= 1

    def _flush_loose(self) -> list[Event]:
        """Loose text followed by readable text is reasoning."""
        loose = self._take_loose()
        if is_blank(joined(loose)):
            return []
        joint = [Event(Kind.REASONING, b"\n")] if Kind.REASONING in self._seen_kinds else []
        self._seen_kinds.add(Kind.REASONING)
        return [*joint, *(Event(Kind.REASONING, data, position) for position, data in loose)]

    def _close(self, *, is_cut: bool = False, is_call: bool = False) -> list[Event]:
        """End the message at hand, whether it has got as far as a body or not."""
        events: list[Event] = []
        if self._at is _At.HEADER:
            loose, text = self._header.texts()
            if is_cut and is_begun_header_word(text):
                text = []
            if text or (is_call and self._declared(self._header.recipient(has_body=False))):
                events = self._open_body(loose, has_body=False)
                for number, (position, data) in enumerate(text):
                    events += self._in_body(position, data.lstrip() if number == 0 else data)
            elif loose:
                self._break_loose()
                self._loose += loose
        if self._at is _At.BODY and self._kind is Kind.TOOL_CALL and self._body_is_empty and not is_cut:
            return [*events, Event(Kind.TOOL_CALL, b"{}", call=self._num_calls - 1)]
        return events
