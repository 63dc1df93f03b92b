"""What every parser of model output offers: token ids in, events out. Parsers never raise, whatever the model wrote."""

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Kind(enum.IntEnum):  # integers, because hashing a plain enum member is slow
    """Part of an answer."""

    CONTENT = enum.auto()
    REASONING = enum.auto()
    TOOL_CALL = enum.auto()


class Event(NamedTuple):
    """Bytes for one part of the answer.

    `position` is the index of the generated token they come from, or below 0 for bytes that no such token has: the
    parser adds them, or they stand in the prompt. A tool call opens with an event that has its `name`; the other events
    of the call carry its arguments.
    """

    kind: Kind
    data: bytes
    position: int = -1
    call: int = -1  # number of the tool call, from 0
    name: str | None = None


class TokenBytes(Protocol):
    """The part of a tokenizer that a parser needs."""

    special_tokens: dict[str, int]

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one id."""


class Parser(Protocol):
    """An incremental state machine over token ids; how the ids are grouped into calls makes no difference."""

    num_undeclared_calls: int
    """Calls to functions that the request did not offer. Their name and arguments become content."""

    def feed(self, token_id: int) -> list[Event]:
        """Events that became certain with this token."""

    @property
    def text_kind(self) -> Kind | None:
        """The part, content or reasoning, to which any token but a control token now adds its bytes and nothing else.

        Such tokens need not be fed, except that `feed` then does not count them in the positions. None if they must be.
        """

    def finish(self) -> list[Event]:
        """Events of whatever was held back; no token follows."""


class ParserFactory(Protocol):
    """Makes the parser of one answer."""

    def __call__(self, prompt_ids: Sequence[int], tool_names: frozenset[str]) -> Parser:
        """`prompt_ids` end where the answer begins, and so decide the parser's first state."""


_SPACES = b" \t\r\n"

BytePiece = tuple[int, bytes]
"""Position of a token, as in `Event`, and bytes of it."""


def between(pieces: Sequence[BytePiece], start: int, end: int | None = None) -> list[BytePiece]:
    """The pieces of bytes `start` to `end` of all; empty ones are dropped."""
    kept, begin = [], 0
    for position, data in pieces:
        inner = data[max(0, start - begin) : None if end is None else max(0, end - begin)]
        if inner:
            kept.append((position, inner))
        begin += len(data)
    return kept


def stripped(pieces: Sequence[BytePiece]) -> list[BytePiece]:
    """The pieces without white space at both ends."""
    data = joined(pieces)
    return between(pieces, len(data) - len(data.lstrip()), len(data.rstrip()))


def joined(pieces: Sequence[BytePiece]) -> bytes:
    """The bytes of all pieces."""
    return b"".join(data for _, data in pieces)


def text_of(pieces: Sequence[BytePiece]) -> str:
    """The text of all pieces."""
    return joined(pieces).decode(errors="replace")


def is_blank(data: bytes) -> bool:
    """True for bytes that are white space only."""
    return not data.strip(_SPACES)
