"""`HarmonyParser`: GPT-OSS output into reasoning, content and tool calls, token by token. Lenient, never raises.

A message is `<|start|>` header `<|message|>` body, ended by `<|end|>`; `<|return|>` and `<|call|>` end the whole turn,
and what follows them is ignored. A header holds role, `<|channel|>` channel, `to=recipient` in either of the two, and
`<|constrain|>` content type.

    recipient functions.x, or a declared tool   tool call x, on any channel
    analysis; commentary to anything else       reasoning
    final; commentary without recipient         content (the latter is a preamble, meant for the user)

Recovery: `<|start|>` or `<|channel|>` always begins a new header; markers that make no sense are skipped; a header that
names no channel makes its body loose. Loose text is shown only if the turn ends with neither content nor a tool call.
Several messages of the same kind are joined by a line break.
"""

import enum
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from server.parsers.base import Event, Kind, TokenBytes, is_blank

log = logging.getLogger(__name__)

REQUIRED = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>"})
END_OF_TURN = ("<|return|>", "<|call|>", "<|endoftext|>")
_CHANNELS = re.compile(r"analysis|commentary|final")
_RECIPIENT = re.compile(r"\bto=([^\s<]\S*)")
_TO_PEOPLE = frozenset({"user", "assistant", "all"})
_FOREIGN_ROLE = re.compile(r"\s*(user|system|developer|tool|functions\.)")
_HEADER_WORDS = re.compile(rb"(?:\s*(?:assistant|analysis|commentary|final)\b)*\s*")
_MAX_HEADER_BYTES = 4096

_Piece = tuple[int, bytes]  # position, data


class _At(enum.Enum):
    """Where in the syntax the parser stands."""

    OUTSIDE = enum.auto()
    ROLE = enum.auto()
    CHANNEL = enum.auto()
    CONSTRAIN = enum.auto()
    BODY = enum.auto()
    DONE = enum.auto()


_IN_HEADER = frozenset({_At.ROLE, _At.CHANNEL, _At.CONSTRAIN})


@dataclass(slots=True)
class _Header:
    text: dict[_At, bytearray] = field(default_factory=lambda: {part: bytearray() for part in _IN_HEADER})
    pieces: list[_Piece] = field(default_factory=list)

    def part(self, part: _At) -> str:
        return self.text[part].decode("utf-8", errors="replace")

    @property
    def channel(self) -> str | None:
        """The channel named last; looked for in the other parts if a marker is missing."""
        for part in (_At.CHANNEL, _At.ROLE, _At.CONSTRAIN):
            if found := _CHANNELS.findall(self.part(part)):
                return str(found[-1])
        return None

    @property
    def recipient(self) -> str | None:
        found = _RECIPIENT.search(self.part(_At.ROLE) + " " + self.part(_At.CHANNEL))
        return found[1] if found else None


class HarmonyParser:
    """One turn of the assistant. The last, unfinished message of the prompt decides the first state."""

    def __init__(
        self, tokenizer: TokenBytes, prompt_ids: Sequence[int] = (), tool_names: frozenset[str] = frozenset()
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._marker = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
        self._tool_names = tool_names
        self._position = -1
        self._at = _At.ROLE
        self._header = _Header()
        self._kind: Kind | None = None  # of the body; None: loose
        self._is_foreign = False  # the body pretends to be somebody else's
        self._body_is_empty = True
        self._seen_kinds: set[Kind] = set()
        self._num_calls = 0
        self._loose: list[_Piece] = []
        self._saw_marker = False
        self._prime(prompt_ids, tokenizer.special_tokens["<|start|>"])

    def feed(self, token_id: int) -> list[Event]:
        """Events of one token."""
        self._position += 1
        return self._advance(token_id)

    def finish(self) -> list[Event]:
        """The loose text, if there is nothing else to show."""
        if self._at in _IN_HEADER and not self._saw_marker:
            self._loose += self._header.pieces  # the model wrote no markup at all
        self._at = _At.DONE
        if self._num_calls or Kind.CONTENT in self._seen_kinds:
            return []
        loose = _without_header_words(self._loose)
        if is_blank(b"".join(data for _, data in loose)):
            return []
        log.warning("model output has no readable final message; showing its text without markup")
        return [Event(Kind.CONTENT, data, position) for position, data in loose]

    def _prime(self, prompt_ids: Sequence[int], start_id: int) -> None:
        """Replay the prompt from its last `<|start|>`, so that an answer may begin inside a header or a body."""
        first = next((i for i in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[i] == start_id), len(prompt_ids))
        for token_id in prompt_ids[first:]:
            self._advance(token_id)
        self._header.pieces.clear()
        self._loose.clear()
        self._saw_marker = False
        if self._at in (_At.OUTSIDE, _At.DONE):
            self._header, self._at = _Header(), _At.ROLE

    def _advance(self, token_id: int) -> list[Event]:
        if self._at is _At.DONE:
            return []
        marker = self._marker.get(token_id)
        if marker is None:
            return self._on_text(self._token_bytes(token_id))
        self._saw_marker = self._saw_marker or marker not in END_OF_TURN
        return self._on_marker(marker)

    def _on_text(self, data: bytes) -> list[Event]:
        if self._at is _At.OUTSIDE:
            self._loose.append((self._position, data))
            return []
        if self._at is not _At.BODY:
            if len(self._header.text[self._at]) < _MAX_HEADER_BYTES:
                self._header.text[self._at] += data
            self._header.pieces.append((self._position, data))
            return []
        if self._is_foreign:
            return []
        if self._kind is None:
            self._loose.append((self._position, data))
            return []
        events = []
        if self._body_is_empty and self._kind is not Kind.TOOL_CALL and self._kind in self._seen_kinds:
            events.append(Event(self._kind, b"\n"))
        self._body_is_empty = False
        self._seen_kinds.add(self._kind)
        call = self._num_calls - 1 if self._kind is Kind.TOOL_CALL else -1
        return [*events, Event(self._kind, data, self._position, call)]

    def _on_marker(self, marker: str) -> list[Event]:
        if marker in END_OF_TURN:
            events = self._close()
            self._at = _At.DONE
            return events
        if marker == "<|start|>":
            events = self._close()
            self._header, self._at = _Header(), _At.ROLE
            return events
        if marker == "<|channel|>":
            return self._on_channel()
        if marker == "<|message|>":
            return self._on_message()
        if marker == "<|constrain|>" and self._at in _IN_HEADER:
            self._at = _At.CONSTRAIN
        elif marker == "<|end|>" and self._at is _At.BODY:
            events = self._close()
            self._at = _At.OUTSIDE
            return events
        return []

    def _on_channel(self) -> list[Event]:
        events: list[Event] = []
        if self._at not in _IN_HEADER:
            events = self._close()
            self._header = _Header()
        self._header.text[_At.CHANNEL] += b" "
        self._at = _At.CHANNEL
        return events

    def _on_message(self) -> list[Event]:
        if self._at is _At.BODY and self._kind is None and not self._is_foreign:
            # A marker too early: what was taken for the body belongs to the header.
            self._header.text[_At.CHANNEL] += b"".join(data for _, data in self._loose)[:_MAX_HEADER_BYTES]
            self._loose = []
        elif self._at not in _IN_HEADER:
            return []
        self._at, self._body_is_empty = _At.BODY, True
        self._is_foreign = bool(_FOREIGN_ROLE.match(self._header.part(_At.ROLE)))
        self._kind = None if self._is_foreign else self._kind_of_body()
        if self._kind is not None:
            self._loose = []
        if self._kind is not Kind.TOOL_CALL:
            return []
        self._num_calls += 1
        name = str(self._header.recipient).removeprefix("functions.")
        return [Event(Kind.TOOL_CALL, b"", call=self._num_calls - 1, name=name)]

    def _kind_of_body(self) -> Kind | None:
        """What the completed header announces; the table is in the module's docstring."""
        recipient, channel = self._header.recipient, self._header.channel
        if recipient and (recipient.startswith("functions.") or recipient in self._tool_names):
            return Kind.TOOL_CALL
        if channel == "analysis":
            return Kind.REASONING
        if channel == "commentary" and recipient and recipient not in _TO_PEOPLE:
            return Kind.REASONING  # a call to something that nobody offered
        return Kind.CONTENT if channel else None

    def _close(self) -> list[Event]:
        """End the message at hand, whether it has got as far as a body or not."""
        if self._at in _IN_HEADER:
            self._loose += self._header.pieces
        if self._at is _At.BODY and self._kind is Kind.TOOL_CALL and self._body_is_empty:
            return [Event(Kind.TOOL_CALL, b"{}", call=self._num_calls - 1)]
        return []


def _without_header_words(pieces: list[_Piece]) -> list[_Piece]:
    """The pieces without the role and channel names at their beginning."""
    found = _HEADER_WORDS.match(b"".join(data for _, data in pieces))
    num_skipped = found.end() if found else 0
    kept = []
    for position, data in pieces:
        if len(data) > num_skipped:
            kept.append((position, data[num_skipped:]))
        num_skipped = max(0, num_skipped - len(data))
    return kept
