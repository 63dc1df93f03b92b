"""`Header`: what a Harmony message header says, and text in it that belongs to no header. Knows no tokens.

A header has sections: the role, then what follows `<|channel|>`, then what follows `<|constrain|>`. Its words are role
and channel names, `to=recipient`, and a content type. Models leave markers out. So a channel is taken from any section,
and the text of an answer may stand in the header because `<|message|>` is missing.
"""

import enum
import re
from dataclasses import dataclass, field

from server.parsers.base import BytePiece, between, is_blank, joined

_CHANNEL = rb"analysis|commentary|final"
_WORD = rb"(?:assistant|" + _CHANNEL + rb")(?=\W|$|assistant|" + _CHANNEL + rb")"
_RECIPIENT = rb"to=[^\s<]*"
_HEADER_WORDS = re.compile(rb"(?:\s*(?:" + _WORD + rb"|" + _RECIPIENT + rb"))*\s*")
_WORDS_ANYWHERE = re.compile(_WORD + rb"|" + _RECIPIENT)
_FIND_CHANNEL = re.compile(_CHANNEL)
_FIND_RECIPIENT = re.compile(rb"\bto=([^\s<]+)")
_CONTENT_TYPE = re.compile(rb"\s*(?:json|code|text|python|typescript|xml|yaml)\b\s*")
_FOREIGN_ROLE = re.compile(rb"\s*(?:(?:user|system|developer|tool)\b|functions\.)")
PROMPT_POSITION = -2  # of bytes that came with the prompt
_BEGINNINGS = (b"assistant", b"analysis", b"commentary", b"final", b"to=")


class Part(enum.Enum):
    """Section of a header."""

    ROLE = enum.auto()
    CHANNEL = enum.auto()
    CONSTRAIN = enum.auto()


@dataclass(slots=True)
class Section:
    """One section, token by token."""

    part: Part
    pieces: list[BytePiece] = field(default_factory=list)

    @property
    def data(self) -> bytes:
        """Its bytes."""
        return joined(self.pieces)

    def num_header_bytes(self) -> int:
        """Length of the header words at its beginning."""
        words = _HEADER_WORDS.match(self.data)
        end = words.end() if words else 0
        has_recipient = words is not None and b"to=" in words[0]
        content_type = _CONTENT_TYPE.match(self.data, end) if has_recipient or self.part is Part.CONSTRAIN else None
        return content_type.end() if content_type else end


class Header:
    """A header, section by section."""

    def __init__(self) -> None:
        self._sections = [Section(Part.ROLE)]

    def begin(self, part: Part) -> None:
        """Begin a section, after its marker."""
        if self.part is not part or self._sections[-1].pieces:
            self._sections.append(Section(part))

    def add(self, position: int, data: bytes) -> None:
        """Add the next token to the current section."""
        self._sections[-1].pieces.append((position, data))

    @property
    def part(self) -> Part:
        """The current section."""
        return self._sections[-1].part

    @property
    def has_text_at_hand(self) -> bool:
        """True if the current section holds more than header words."""
        section = self._sections[-1]
        return not is_blank(section.data[section.num_header_bytes() :])

    @property
    def is_foreign(self) -> bool:
        """True if the header names another author than the assistant."""
        return bool(_FOREIGN_ROLE.match(self._sections[0].data))

    @property
    def names_channel(self) -> bool:
        """True if `<|channel|>` is followed by a name, known or not."""
        return any(section.part is Part.CHANNEL and not is_blank(section.data) for section in self._sections)

    def channel(self, *, has_body: bool) -> str | None:
        """The channel named last. Without a body only the words at the beginning of a section count."""
        for section in reversed(self._sections):
            found = _FIND_CHANNEL.findall(section.data[: section.num_header_bytes()])
            if not found and has_body:
                found = _FIND_CHANNEL.findall(section.data)
            if found:
                return str(found[-1].decode())
        return None

    def recipient(self, *, has_body: bool) -> list[BytePiece]:
        """Whom the message is for; nothing if the header does not say."""
        for section in self._sections:
            if section.part is Part.CONSTRAIN:
                continue
            data = section.data if has_body else section.data[: section.num_header_bytes()]
            if found := _FIND_RECIPIENT.search(data):
                return between(section.pieces, *found.span(1))
        return []

    def texts(self) -> tuple[list[BytePiece], list[BytePiece]]:
        """The text before the recipient, and that after it: an answer whose `<|message|>` is missing.

        Without a recipient all text is the answer, and so is what another author wrote.
        """
        kept: list[BytePiece] = []
        for section in self._sections:
            pieces = between(section.pieces, section.num_header_bytes())
            kept += [] if is_blank(joined(pieces)) else pieces
        kept = [(position, data) for position, data in kept if position != PROMPT_POSITION]
        named = [] if self.is_foreign else self.recipient(has_body=False)
        num_before = sum(position < named[0][0] for position, _ in kept) if named else 0
        return kept[:num_before], kept[num_before:]

    def stray_text(self) -> list[BytePiece]:
        """Text in a header that a body follows; a single word after `<|channel|>` or a recipient does not count."""
        has_recipient = bool(self.recipient(has_body=True))
        kept: list[BytePiece] = []
        for section in self._sections:
            data = joined([piece for piece in section.pieces if piece[0] != PROMPT_POSITION])
            data = _WORDS_ANYWHERE.sub(b"", data).strip()
            is_name = (section.part is not Part.ROLE or has_recipient) and len(data.split()) == 1
            if data and not is_name:
                kept.append((-1, data))
        return kept


def is_begun_header_word(pieces: list[BytePiece]) -> bool:
    """True for a header word that the end of the answer has cut short."""
    text = joined(pieces).strip()
    return any(word.startswith(text) for word in _BEGINNINGS)


def without_header_words(pieces: list[BytePiece]) -> list[BytePiece]:
    """The pieces without the role and channel names at their beginning."""
    found = _HEADER_WORDS.match(joined(pieces))
    return between(pieces, found.end() if found else 0)
