"""Sets of characters as sorted ranges of code points: what a regular expression's classes mean.

A shorthand class has two sets, because ECMAScript and Python disagree outside of ASCII: `sure` holds characters that
are members for both, `possible` those that are members for either. A class is made of sure members, a negated class
leaves out all possible ones. So whoever checks the answer finds that it matches.
"""

from collections.abc import Iterable
from typing import NamedTuple

Ranges = tuple[tuple[int, int], ...]
"""Pairs of first and last code point, sorted, without overlap."""

_LAST = 0x10FFFF
_SURROGATES = ((0xD800, 0xDFFF),)


class Shorthand(NamedTuple):
    """`\\d`, `\\w` or `\\s`, or the opposite of one of them."""

    sure: Ranges
    possible: Ranges


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    """Members of any of the sets."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(pair for each in sets for pair in each):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """All other characters; surrogates are no characters."""
    rest, begin = [], 0
    for first, last in union(ranges, _SURROGATES):
        if first > begin:
            rest.append((begin, first - 1))
        begin = last + 1
    return (*rest, (begin, _LAST)) if begin <= _LAST else tuple(rest)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Members of the first set that are not in the second."""
    return complement(union(complement(ranges), others))


def single(character: str) -> Ranges:
    """The set of one character."""
    return ((ord(character), ord(character)),)


def _of(text: str) -> Ranges:
    return union(*map(single, text))


_NON_ASCII: Ranges = ((0x80, _LAST),)
_DIGITS = _of("0123456789")
_WORD = union(_DIGITS, ((0x41, 0x5A), (0x61, 0x7A)), _of("_"))
_SPACES = _of("\t\n\v\f\r ")
_ALL_SPACES = union(
    _SPACES, ((0x1C, 0x1F), (0x2000, 0x200A)), _of("\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff")
)
LINE_ENDS = _of("\n\r\u2028\u2029")
JSON_ESCAPED: Ranges = union(((0, 0x1F),), _of('"\\'))
"""Characters that a JSON string holds in escaped form only."""


def _opposite(each: Shorthand) -> Shorthand:
    return Shorthand(sure=complement(each.possible), possible=complement(each.sure))


SHORTHANDS = {
    "d": Shorthand(_DIGITS, union(_DIGITS, _NON_ASCII)),
    "w": Shorthand(_WORD, union(_WORD, _NON_ASCII)),
    "s": Shorthand(_SPACES, _ALL_SPACES),
}
SHORTHANDS |= {name.upper(): _opposite(each) for name, each in list(SHORTHANDS.items())}
