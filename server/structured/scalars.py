"""Numbers and strings of a JSON Schema, merged from all parts that hold for the value, in the compiler's terms."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from server.structured.charsets import complement
from server.structured.document import Place, integer_at, path_of
from server.structured.errors import PatternError, SchemaError, Unsatisfiable
from server.structured.formats import NOTES, PATTERN_OF_FORMAT
from server.structured.pattern import ANY_TEXT, MAX_COUNT, Chars, Node, Repeat, length_range, parse
from server.structured.pattern import Sequence as Parts
from server.structured.pattern_text import text_of

Schemas = Sequence[tuple[Place, dict[str, Any]]]
"""Keywords of the parts that hold for a value, with their places."""

MAX_MULTIPLE = 1024
MAX_MULTIPLE_RANGE = 10_000
_MAX_INT = 2**53
_MAX_DECIMALS = 6  # xgrammar 0.2.9 writes no more where there are bounds, and nothing at all if none fits between them
_DECIMAL_STEPS = 10**_MAX_DECIMALS
_LOW_KEYWORDS = ("minimum", "exclusiveMinimum")


def number(schemas: Schemas, *, is_integer: bool) -> dict[str, Any]:
    """A number within all bounds. A number that must be a multiple of an integer is an integer.

    Raises:
        SchemaError: a bound that is no number or beyond 2^53, a range that is too narrow, or a `multipleOf` that cannot
            be honoured.
        Unsatisfiable: no number is left.
    """
    multiples = [(place, _number_at(place, each, "multipleOf")) for place, each in schemas if "multipleOf" in each]
    for place, multiple in multiples:
        if multiple <= 0 or multiple != int(multiple) or multiple > MAX_MULTIPLE:
            reason = f"only whole numbers from 1 to {MAX_MULTIPLE} are supported"
            raise SchemaError(path_of((*place, "multipleOf")), reason)
    lows = [*_bounds(schemas, "minimum"), *_bounds(schemas, "exclusiveMinimum", toward=math.inf)]
    highs = [*_bounds(schemas, "maximum"), *_bounds(schemas, "exclusiveMaximum", toward=-math.inf)]
    low, high = max(lows, default=None), min(highs, default=None)
    if is_integer or multiples:
        return _integer(multiples, low, high)
    if low is not None and high is not None and low > high:
        raise Unsatisfiable("the lowest number allowed exceeds the highest")
    built: dict[str, Any] = {"type": "number"}
    if low is not None:
        built["minimum"] = float(Fraction(math.ceil(low * _DECIMAL_STEPS), _DECIMAL_STEPS))
    if high is not None:
        built["maximum"] = float(Fraction(math.floor(high * _DECIMAL_STEPS), _DECIMAL_STEPS))
    if low is not None and high is not None and built["minimum"] > built["maximum"]:
        place = next((*place, keyword) for place, each in schemas for keyword in _LOW_KEYWORDS if keyword in each)
        reason = f"no number with at most {_MAX_DECIMALS} decimals lies between it and the maximum: widen the range"
        raise SchemaError(path_of(place), reason)
    return built


def _integer(multiples: list[tuple[Place, Fraction]], low: Fraction | None, high: Fraction | None) -> dict[str, Any]:
    built: dict[str, Any] = {"type": "integer"}
    if low is not None:
        built["minimum"] = math.ceil(low)
    if high is not None:
        built["maximum"] = math.floor(high)
    if low is not None and high is not None and built["minimum"] > built["maximum"]:
        raise Unsatisfiable("the lowest integer allowed exceeds the highest")
    if not multiples:
        return built
    where = path_of((*multiples[0][0], "multipleOf"))
    multiple = math.lcm(*(int(each) for _, each in multiples))
    if multiple == 1:
        return built
    if low is None and high is None:
        if multiple > MAX_MULTIPLE:
            raise SchemaError(where, f"multiples of {multiple} are not supported without bounds")
        return {**built, "multipleOf": multiple}
    if low is None or high is None:
        raise SchemaError(where, "beside one bound it is not supported: give both minimum and maximum, or neither")
    if built["maximum"] - built["minimum"] > MAX_MULTIPLE_RANGE * multiple:
        raise SchemaError(where, f"more than {MAX_MULTIPLE_RANGE} multiples lie between minimum and maximum")
    first = -(-built["minimum"] // multiple) * multiple
    values = list(range(first, built["maximum"] + 1, multiple))
    if not values:
        raise Unsatisfiable("no multiple lies between minimum and maximum")
    return {"enum": values}


def _bounds(schemas: Schemas, keyword: str, *, toward: float | None = None) -> list[Fraction]:
    """What a keyword allows at the least or most. An exclusive bound gives the next double `toward` infinity.

    Most readers take a number for the nearest double, so what lies between the two may be read as the bound.
    """
    bounds = [_number_at(place, each, keyword) for place, each in schemas if keyword in each]
    return bounds if toward is None else [Fraction(str(math.nextafter(bound, toward))) for bound in bounds]


def _number_at(place: Place, schema: dict[str, Any], keyword: str) -> Fraction:
    value = schema[keyword]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SchemaError(path_of((*place, keyword)), "it must be a number")
    if not -_MAX_INT <= value <= _MAX_INT:
        raise SchemaError(path_of((*place, keyword)), "numbers beyond 2^53 are not supported")
    return Fraction(str(value))


def string(schemas: Schemas) -> dict[str, Any]:
    """A string. Raises what `string_tree` raises."""
    node = string_tree(schemas)
    if node is None:
        return {"type": "string"}
    if isinstance(node, Repeat) and node.part == ANY_TEXT.part:
        most = {} if node.high is None else {"maxLength": node.high}
        return {"type": "string", "minLength": node.low, **most}
    return {"type": "string", "pattern": text_of(node, in_json=True)}


def string_tree(schemas: Schemas) -> Node | None:
    """What a string must match, as an expression over its characters; None for any string.

    Raises:
        SchemaError: a pattern or format that cannot be honoured, or several rules at once.
        Unsatisfiable: no length is allowed.
    """
    rules: dict[Node, Place] = {}
    low, high, length_place = 0, MAX_COUNT, None
    for place, each in schemas:
        for keyword in ("pattern", "format"):
            node = _rule_at(place, each, keyword)
            if node is not None and node != ANY_TEXT:
                rules.setdefault(node, (*place, keyword))
        for keyword in ("minLength", "maxLength"):
            count = integer_at(place, each, keyword)
            if count is None or (keyword == "minLength" and count <= low) or (keyword == "maxLength" and count >= high):
                continue
            length_place = (*place, keyword)
            low, high = (count, high) if keyword == "minLength" else (low, count)
    if low > MAX_COUNT:
        raise SchemaError(path_of(length_place or ()), f"at most {MAX_COUNT} characters can be asked for")
    if low > high:
        raise Unsatisfiable(f"the shortest length {low} exceeds the longest {high}")
    most = None if high == MAX_COUNT else high
    if len(rules) > 1:
        reason = "a string cannot have two patterns or formats: write one pattern for both"
        raise SchemaError(path_of(list(rules.values())[1]), reason)
    if not rules:
        return None if low == 0 and most is None else Repeat(Chars(complement(())), low, most)
    node = _within(next(iter(rules)), low, most)
    if node is None:
        reason = "it cannot be combined with this pattern or format: write the length into the pattern"
        raise SchemaError(path_of(length_place or ()), reason)
    return node


def _rule_at(place: Place, schema: dict[str, Any], keyword: str) -> Node | None:
    value = schema.get(keyword)
    if value is None:
        return None
    where = path_of((*place, keyword))
    if not isinstance(value, str):
        raise SchemaError(where, "it must be a string")
    if keyword == "format" and value in NOTES:
        return None
    if keyword == "format" and value not in PATTERN_OF_FORMAT:
        known = ", ".join(PATTERN_OF_FORMAT)
        raise SchemaError(where, f"'{value[:40]}' is not supported. These are: {known}")
    try:
        return (
            parse(value, is_search=True) if keyword == "pattern" else parse(PATTERN_OF_FORMAT[value], is_search=False)
        )
    except PatternError as error:
        raise SchemaError(where, str(error)) from None


def _within(node: Node, low: int, high: int | None) -> Node | None:
    """The texts of a node whose length lies within bounds; None if that is not simple to say.

    Raises:
        Unsatisfiable: no text has such a length.
    """
    shortest, longest = length_range(node)
    if (high is not None and shortest > high) or (longest is not None and longest < low):
        raise Unsatisfiable("the pattern matches no string of the lengths allowed")
    if shortest >= low and (high is None or (longest is not None and longest <= high)):
        return node
    parts = node.parts if isinstance(node, Parts) else (node,)
    lengths = [length_range(part) for part in parts]
    varying = [index for index, (least, most) in enumerate(lengths) if least != most]
    if len(varying) != 1:
        return None
    [index] = varying
    part = parts[index]
    if not isinstance(part, Repeat) or not isinstance(part.part, Chars):
        return None
    fixed = shortest - lengths[index][0]
    highs = [each for each in (part.high, None if high is None else high - fixed) if each is not None]
    tightened = Repeat(part.part, max(part.low, low - fixed), min(highs, default=None))
    return Parts((*parts[:index], tightened, *parts[index + 1 :]))
