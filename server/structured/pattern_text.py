"""Writes the tree of a regular expression as the grammar compiler reads it, for plain text or for a JSON string."""

from collections.abc import Collection

from server.structured.charsets import JSON_ESCAPED, Ranges, complement, single, union, without
from server.structured.errors import Unsatisfiable
from server.structured.pattern import ANY_TEXT, Chars, Either, Node, Repeat, Sequence

_SHORT_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_OPERATORS = frozenset("\\^$.|?*+()[]{}-/")
# An expression in ASCII becomes an automaton, which xgrammar 0.2.9 builds wrongly: (?:a[0-9]{1,2})? matches "7". It is
# also slow for large counts. With any other character it becomes a grammar. This part matches the empty text only.
_AS_GRAMMAR = "\ufffd{0}"


def text_of(node: Node, *, in_json: bool) -> str:
    """The expression in the compiler's syntax. With `in_json` it matches what stands between the quotes of a string.

    A class that has plain characters and characters that JSON escapes (quotes, controls) loses the latter.

    Raises:
        Unsatisfiable: a part of it matches nothing.
    """
    return _AS_GRAMMAR + _text(node, in_json=in_json)


def names_except(names: Collection[str]) -> Node:
    """All texts but the names given."""
    if not names:
        return ANY_TEXT
    followers: dict[str, list[str]] = {}
    for name in sorted(names):
        if name:
            followers.setdefault(name[0], []).append(name[1:])
    others = complement(union(*map(single, followers)))
    options: list[Node] = [Sequence((Chars(others), ANY_TEXT))]
    options += [Sequence((Chars(single(first)), names_except(rest))) for first, rest in followers.items()]
    return Either(tuple(options)) if "" in names else Either((Sequence(()), *options))


def _text(node: Node, *, in_json: bool) -> str:
    if isinstance(node, Chars):
        return _text_of_chars(node.ranges, in_json=in_json)
    if isinstance(node, Sequence):
        return "".join(_text(part, in_json=in_json) for part in node.parts)
    if isinstance(node, Either):
        return f"(?:{'|'.join(_text_of_options(node.options, in_json=in_json))})"
    if not isinstance(node, Repeat):
        raise TypeError(f"{node} is not part of a parsed expression")
    if node.high == 0:
        return ""
    part = _text(node.part, in_json=in_json)
    return f"(?:{part}){_text_of_bounds(node.low, node.high)}" if part else ""


def _text_of_options(options: Collection[Node], *, in_json: bool) -> list[str]:
    """The options that match anything."""
    texts = []
    for option in options:
        try:
            texts.append(_text(option, in_json=in_json))
        except Unsatisfiable:
            continue
    if not texts:
        raise Unsatisfiable("no alternative matches anything")
    return texts


def _text_of_bounds(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return "?" if (low, high) == (0, 1) else f"{{{low}}}" if low == high else f"{{{low},{high}}}"


def _text_of_chars(ranges: Ranges, *, in_json: bool) -> str:
    if not ranges:
        raise Unsatisfiable("a class of characters is empty")
    plain = without(ranges, JSON_ESCAPED) if in_json else ranges
    if not plain:
        escapes = [_json_escape(code) for first, last in ranges for code in range(first, last + 1)]
        return escapes[0] if len(escapes) == 1 else f"(?:{'|'.join(escapes)})"
    if plain[0][0] == plain[-1][1]:
        return _literal(plain[0][0])
    members = (_literal(first) if first == last else f"{_literal(first)}-{_literal(last)}" for first, last in plain)
    return f"[{''.join(members)}]"  # not negated: the compiler's negated classes have surrogates in them


def _literal(code: int) -> str:
    """A character. The compiler reads the code of an operator as the operator, so those have a backslash instead."""
    character = chr(code)
    if character in _OPERATORS:
        return "\\" + character
    return character if character.isascii() and character.isprintable() else f"\\u{{{code:x}}}"


def _json_escape(code: int) -> str:
    short = _SHORT_ESCAPES.get(chr(code))
    escape = f"u{code:04x}" if short is None else short
    return "".join(_literal(ord(character)) for character in "\\" + escape)
