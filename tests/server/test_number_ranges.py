"""Numbers with bounds: what the grammar allows lies within them, and bounds that leave nothing to write are refused."""

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from server.structured.errors import SchemaError
from server.structured.json_schema import prepare_schema
from tests.server.grammar_walk import accepts, compile_schema, random_text
from tests.server.schemas import closed, integer, number
from tests.tables import rows

STEP = Fraction(1, 10**6)
LARGEST = 2.0**53
MAGNITUDES = st.integers(-12, 16).map(lambda exponent: min(10.0**exponent, LARGEST))
BOUNDS = st.one_of(
    st.sampled_from([0.0, 1e-7, 0.1, 0.1000005, 1.0, LARGEST, -LARGEST, LARGEST - 1]),
    MAGNITUDES.flatmap(lambda size: st.floats(-size, size)),
    st.tuples(MAGNITUDES, st.integers(0, 6)).flatmap(
        lambda p: st.floats(-p[0], p[0]).map(lambda value: round(value, p[1]))
    ),
)
WIDTHS = st.one_of(st.sampled_from([0.0, 1e-7, 5e-7, 1e-6, 2e-6, 1e-5, 1.0]), MAGNITUDES)


@st.composite
def ranges(draw):
    """Bounds in one direction or both, the upper one often close to the lower one."""
    low = draw(BOUNDS)
    high = min(draw(st.one_of(WIDTHS.map(lambda width: low + width), st.just(math.nextafter(low, math.inf)))), LARGEST)
    lows = draw(st.sampled_from([{}, {"minimum": low}, {"exclusiveMinimum": low}]))
    highs = draw(st.sampled_from([{"maximum": high}, {"exclusiveMaximum": high}] + ([{}] if lows else [])))
    return lows | highs


def written(value):
    """A number as a grammar may write it."""
    num_steps = round(value / STEP)
    whole, part = divmod(abs(num_steps), 10**6)
    return f"{'-' if num_steps < 0 else ''}{whole}.{part:06d}".rstrip("0").rstrip(".")


def numbers_near(bounds):
    """Numbers with 6 decimals beside each bound, at distances where a digit changes."""
    distances = [0, STEP, 9 * STEP, 10 * STEP, Fraction(1, 10), 1, 10]
    nears = {bound + sign * each for bound in bounds for sign in (1, -1) for each in distances}
    return {text for text in map(written, nears) if text != "-0"}


@settings(max_examples=250, deadline=None, derandomize=True)
@given(bounds=ranges(), type_=st.sampled_from(["number", "integer"]), seed=st.integers(0, 99))
def test_what_is_allowed_lies_within_the_bounds(bounds, type_, seed):
    schema = {"type": type_, **bounds}
    is_valid = Draft202012Validator(schema).is_valid
    nears = numbers_near(Fraction(str(bound)) for bound in bounds.values())
    if type_ == "integer":
        nears = {text for text in nears if "." not in text}
    try:
        grammar = compile_schema(schema)
    except SchemaError:
        assert not any(is_valid(json.loads(text)) for text in nears)
        return
    text = random_text(grammar, seed)
    assert text is None or is_valid(json.loads(text))
    assert [each for each in nears if accepts(grammar, each) and not is_valid(json.loads(each))] == []
    if max(map(abs, bounds.values())) < 2**33:  # beyond, doubles are further apart than numbers with 6 decimals
        assert [each for each in nears if is_valid(json.loads(each)) and not accepts(grammar, each)] == []


@rows(
    "rules, place",
    ({"exclusiveMinimum": 0.1, "exclusiveMaximum": 0.1000005}, "exclusiveMinimum"),
    ({"exclusiveMinimum": 0, "maximum": 1e-7}, "exclusiveMinimum"),
    ({"exclusiveMinimum": 1e-6, "exclusiveMaximum": 2e-6}, "exclusiveMinimum"),
    ({"minimum": 0.1000001, "maximum": 0.1000009}, "minimum"),
    ({"minimum": -2e-7, "maximum": -1e-7}, "minimum"),
)
def test_a_range_without_a_number_of_six_decimals_is_refused(rules, place):
    """Its grammar allowed the empty text alone, so that the answer was no JSON."""
    with pytest.raises(SchemaError, match="at most 6 decimals") as caught:
        prepare_schema(closed(rate=number(**rules)))
    assert caught.value.path == f"properties.rate.{place}"


@rows(
    "schema",
    number(exclusiveMinimum=1, maximum=1),
    number(minimum=1, exclusiveMaximum=1),
    integer(minimum=0.1, maximum=0.9),
)
def test_a_range_without_any_number_allows_no_value(schema):
    with pytest.raises(SchemaError, match="no value satisfies the schema"):
        prepare_schema(schema)


def test_an_exclusive_bound_is_not_read_from_a_number_beside_it():
    """Near 2^53 the nearest double of 9007199254740991.888888 is the bound itself."""
    largest = 2**53
    grammar = compile_schema(number(minimum=largest - 1, exclusiveMaximum=largest))
    assert accepts(grammar, "9007199254740991")
    assert not accepts(grammar, "9007199254740991.888888")
    assert not accepts(compile_schema(integer(exclusiveMinimum=largest)), str(largest + 1))
