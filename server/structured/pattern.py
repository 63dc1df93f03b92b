"""Regular expressions of clients: read into a tree, refused where they go beyond regular languages.

`pattern` in JSON Schema is a search: without `^` and `$` any text may stand around the match. The grammar compiler, in
contrast, matches whole texts, drops anchors and ignores lookaheads. So we read the expression ourselves (the common
part of ECMAScript and Python), make the text around the match explicit, and write it anew.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from server.structured.charsets import LINE_ENDS, SHORTHANDS, Ranges, Shorthand, complement, single, union
from server.structured.errors import PatternError

MAX_PATTERN_CHARS = 4096
MAX_COUNT = 10_000_000
_MAX_NESTING = 50
_MAX_STEPS = 50_000


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """One part after the other."""

    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Either:
    """Any one of the options."""

    options: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part at least `low` times and at most `high` times; None: any number."""

    part: "Node"
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """`^` or `$`. Only `parse` sees one: at the ends of an alternative they are dealt with, elsewhere refused."""

    sign: str


Node = Chars | Sequence | Either | Repeat | Anchor
ANY_TEXT = Repeat(Chars(complement(())), 0, None)
_ANY_IN_LINE = Chars(complement(LINE_ENDS))
_BRACES = re.compile(r"\{(?:([0-9]+)(?:(,)([0-9]*))?|,[0-9]*)\}")
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}


@lru_cache(maxsize=256)
def parse(pattern: str, *, is_search: bool) -> Node:
    """The tree of an expression that matches whole texts; with `is_search` the texts that the expression is found in.

    Raises:
        PatternError: not an expression, or one with assertions, backreferences, flags or Unicode properties.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternError(f"it has {len(pattern)} characters: at most {MAX_PATTERN_CHARS} are accepted")
    reader = _Reader(pattern)
    options = reader.read_options(0)
    if reader.at < len(pattern):
        reader.fail("')' closes nothing")
    return _either([_whole(option, is_search=is_search) for option in options])


def length_range(node: Node) -> tuple[int, int | None]:
    """Fewest and most characters of a match; None: no bound."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Repeat):
        low, high = length_range(node.part)
        most = 0 if high == 0 or node.high == 0 else None if high is None or node.high is None else high * node.high
        return low * node.low, most
    if isinstance(node, Either):
        bounds = [length_range(option) for option in node.options]
        highs = [high for _, high in bounds if high is not None]
        return min(low for low, _ in bounds), max(highs) if len(highs) == len(bounds) else None
    parts = node.parts if isinstance(node, Sequence) else ()
    bounds = [length_range(part) for part in parts]
    highs = [high for _, high in bounds if high is not None]
    return sum(low for low, _ in bounds), sum(highs) if len(highs) == len(bounds) else None


def matches(node: Node, text: str) -> bool:
    """Whether a tree matches a whole text. Takes polynomial time, unlike `re`, whatever a client wrote.

    Raises:
        PatternError: it takes more than `_MAX_STEPS` steps.
    """
    memory: dict[tuple[int, int], frozenset[int]] = {}
    num_steps = 0

    def ends(part: Node, start: int) -> frozenset[int]:
        """Where a match that begins at `start` may end."""
        nonlocal num_steps
        key = (id(part), start)
        if key not in memory:
            num_steps += 1
            if num_steps > _MAX_STEPS:
                raise PatternError("it is too complex to be combined with names of properties")
            memory[key] = _ends(part, start, text, ends)
        return memory[key]

    return len(text) in ends(node, 0)


def _ends(part: Node, start: int, text: str, ends: Callable[[Node, int], frozenset[int]]) -> frozenset[int]:
    if isinstance(part, Chars):
        code = ord(text[start]) if start < len(text) else -1
        return frozenset([start + 1]) if any(first <= code <= last for first, last in part.ranges) else frozenset()
    if isinstance(part, Either):
        return frozenset().union(*(ends(option, start) for option in part.options))
    if isinstance(part, Repeat):
        return _ends_of_repeat(part, start, ends)
    at = frozenset([start])
    for inner in part.parts if isinstance(part, Sequence) else ():
        at = frozenset().union(*(ends(inner, position) for position in at))
    return at


def _ends_of_repeat(part: Repeat, start: int, ends: Callable[[Node, int], frozenset[int]]) -> frozenset[int]:
    at = frozenset([start])
    reached: frozenset[int] = at if part.low == 0 else frozenset()
    count = 0
    while part.high is None or count < part.high:
        after: frozenset[int] = frozenset().union(*(ends(part.part, position) for position in at))
        count += 1
        if not after:
            break
        if count < part.low and after == at:  # the part matches the empty text, so more of it changes nothing
            count = part.low
        if count >= part.low:
            if after <= reached:
                break
            reached |= after
        at = after
    return reached


def _whole(option: list[Node], *, is_search: bool) -> Node:
    """An alternative without its anchors, and with the text that may stand before and after its match."""
    begins = bool(option) and option[0] == Anchor("^")
    ends = bool(option) and option[-1] == Anchor("$")
    inner = option[begins : len(option) - ends]
    if any(_has_anchor(part) for part in inner):
        raise PatternError("'^' and '$' are supported at the beginning and the end only")
    before = [ANY_TEXT] if is_search and not begins else []
    after = [ANY_TEXT] if is_search and not ends else []
    return _sequence([*before, *inner, *after])


def _has_anchor(node: Node) -> bool:
    if isinstance(node, Sequence | Either):
        return any(map(_has_anchor, node.parts if isinstance(node, Sequence) else node.options))
    return isinstance(node, Anchor) or (isinstance(node, Repeat) and _has_anchor(node.part))


def _sequence(parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def _either(options: list[Node]) -> Node:
    return options[0] if len(options) == 1 else Either(tuple(options))


class _Reader:
    """Recursive descent over the text; `at` is the next character."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.at = 0

    def fail(self, reason: str) -> NoReturn:
        raise PatternError(f"{reason} (at character {self.at})")

    def read_options(self, depth: int) -> list[list[Node]]:
        """Alternatives up to the end or a closing parenthesis."""
        if depth > _MAX_NESTING:
            self.fail(f"groups are nested more than {_MAX_NESTING} deep")
        options: list[list[Node]] = [[]]
        while self.at < len(self._text) and self._text[self.at] != ")":
            if self._take("|"):
                options.append([])
            else:
                options[-1].append(self._quantified(self._atom(depth)))
        return options

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def _next(self) -> str:
        if self.at >= len(self._text):
            self.fail("the expression ends too early")
        self.at += 1
        return self._text[self.at - 1]

    def _atom(self, depth: int) -> Node:
        self._refuse_repetition("a repetition repeats nothing")
        sign = self._next()
        if sign == "(":
            return self._group(depth)
        if sign == "[":
            return Chars(self._class())
        if sign == ".":
            return _ANY_IN_LINE
        if sign in "^$":
            return Anchor(sign)
        if sign == "\\":
            found = self._escape(in_class=False)
            return Chars(found.sure if isinstance(found, Shorthand) else single(found))
        return Chars(single(sign))

    def _group(self, depth: int) -> Node:
        if self._take("?") and not self._take(":"):
            is_named = self._take("P<") or (self._text[self.at : self.at + 2] not in ("<=", "<!") and self._take("<"))
            end = self._text.find(">", self.at)
            if not is_named or end < 0 or not self._text[self.at : end].isidentifier():
                self.fail("assertions, flags and other special groups are not supported")
            self.at = end + 1
        options = [_sequence(parts) for parts in self.read_options(depth + 1)]
        if not self._take(")"):
            self.fail("a group is not closed")
        return _either(options)

    def _quantified(self, atom: Node) -> Node:
        bounds = self._bounds()
        if bounds is None:
            return atom
        if isinstance(atom, Anchor):
            self.fail("an anchor cannot be repeated")
        low, high = bounds
        if max(low, high or 0) > MAX_COUNT:
            self.fail(f"a part may be repeated at most {MAX_COUNT} times")
        if high is not None and high < low:
            self.fail("the repetition's bounds are out of order")
        self._take("?")  # a lazy repetition matches the same texts
        self._refuse_repetition("a repetition is repeated")
        return Repeat(atom, low, high)

    def _refuse_repetition(self, reason: str) -> None:
        """Fail where a repetition begins at the next character."""
        start = self.at
        if self._bounds() is not None:
            self.at = start
            self.fail(reason)

    def _bounds(self) -> tuple[int, int | None] | None:
        """How often a repetition at the next character repeats; None if none begins there, as in `{a}`."""
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        braces = _BRACES.match(self._text, self.at)
        if braces is None:
            return None
        low, comma, high = braces.groups()
        if low is None:
            self.fail("'{,' is a repetition in Python and text in ECMAScript: write '{0,' or '\\{,'")
        self.at = braces.end()
        return int(low), int(high) if high else None if comma else int(low)

    def _class(self) -> Ranges:
        """A class after its `[`, as a set of characters."""
        is_negated = self._take("^")
        if self._text[self.at : self.at + 1] == "]":
            self.fail("an empty class, or one that begins with ']', is not supported: write '\\]'")
        members: list[Ranges] = []
        while not self._take("]"):
            low = self._member()
            if isinstance(low, Shorthand):
                members.append(low.possible if is_negated else low.sure)
            elif self._text[self.at : self.at + 1] == "-" and self._text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self._member()
                if isinstance(high, Shorthand) or ord(high) < ord(low):
                    self.fail("a range of characters is out of order")
                members.append(((ord(low), ord(high)),))
            else:
                members.append(single(low))
        ranges = union(*members)
        return complement(ranges) if is_negated else ranges

    def _member(self) -> str | Shorthand:
        sign = self._next()
        if sign == "[" and self._text[self.at : self.at + 1] == ":":
            self.fail("POSIX classes are not supported")
        return self._escape(in_class=True) if sign == "\\" else sign

    def _escape(self, *, in_class: bool) -> str | Shorthand:
        sign = self._next()
        if sign in SHORTHANDS:
            return SHORTHANDS[sign]
        if sign in _CONTROLS and not (sign == "0" and self._text[self.at : self.at + 1].isdigit()):
            return _CONTROLS[sign]
        if in_class and sign == "b":
            return "\b"
        if sign == "x":
            return self._code(2)
        if sign == "u":
            return self._unicode()
        if sign.isalnum():
            self.fail(f"'\\{sign}' is not supported")
        return sign

    def _unicode(self) -> str:
        if self._take("{"):
            end = self._text.find("}", self.at)
            code = self._code(max(0, end - self.at))
            self.at += 1
            return code
        return self._code(4)

    def _code(self, num_digits: int) -> str:
        digits = self._text[self.at : self.at + num_digits]
        if (
            not 0 < num_digits <= 6
            or len(digits) < num_digits
            or not all(c in "0123456789abcdefABCDEF" for c in digits)
        ):
            self.fail("hexadecimal digits are missing")
        self.at += num_digits
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            self.fail("a code is not that of a character")
        return chr(code)
