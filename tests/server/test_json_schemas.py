"""What is honoured of JSON Schema: every text that the grammar of a schema allows satisfies the schema."""

import json
import re
from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from server.structured.document import TYPES_OF_KEYWORD
from server.structured.errors import PatternError, SchemaError
from server.structured.formats import PATTERN_OF_FORMAT
from server.structured.json_schema import prepare_schema
from server.structured.pattern import length_range, matches, parse
from tests.server.grammar_walk import accepts, compile_schema, random_text
from tests.server.schemas import SCHEMAS, closed, integer, object_, string
from tests.tables import rows

NUM_TEXTS = 4


def faults(schema, text):
    """What is wrong with an answer, formats included."""
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    return [error.message for error in validator.iter_errors(json.loads(text))]


def test_there_are_200_schemas_and_all_are_valid():
    assert len(SCHEMAS) >= 200
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


@rows("name", *SCHEMAS)
def test_random_texts_satisfy_their_schema(name):
    grammar = compile_schema(SCHEMAS[name])
    texts = [random_text(grammar, seed) for seed in range(NUM_TEXTS)]
    ended = [text for text in texts if text is not None]
    assert [fault for text in ended for fault in faults(SCHEMAS[name], text)] == []
    assert ended, "no text ended"


def accepted(schema, *values):
    """Those of the values that the grammar of a schema allows."""
    grammar = compile_schema(schema)
    return [value for value in values if accepts(grammar, json.dumps(value, ensure_ascii=False))]


URI_BAD = ["example", "http://", "http://-a", "http://a-.b", "http://a..b", "http://a:0", "http://a b", "h", "1a://b"]
USUAL_VALUES = [
    (string(pattern="^ab"), ["ab", "abc", "ab é"], ["xab", "a"]),
    (string(pattern="ab"), ["ab", "xaby"], ["ba"]),
    (string(pattern="^(a|b)$"), ["a", "b"], ["c", "ab"]),
    (string(minLength=2, maxLength=3), ["ab", "日本語", "a b"], ["a", "abcd"]),
    (string(pattern="^[a-z]+$", maxLength=2), ["a", "ab"], ["abc", ""]),
    (string(pattern="^\\D$"), ["x", "-"], ["3", "٣"]),
    (string(pattern="^[^\\d]$"), ["x", "-"], ["3", "٣"]),
    (string(pattern="^\\W$"), ["-", " "], ["x", "é"]),
    (string(pattern="^a{$"), ["a{"], ["a"]),
    (string(pattern="^{a}{2}{b, c}$"), ["{a}}{b, c}"], ["{a}{2}{b, c}", "aa"]),
    (string(pattern="^a{1,2,3}{}$"), ["a{1,2,3}{}"], ["a"]),
    (string(pattern="^a{003}$"), ["aaa"], ["a{003}"]),
    (string(format="date"), ["2024-02-29", "1999-12-31"], ["2023-02-29", "2024-13-01", "2024-1-1"]),
    (string(format="email"), ["a.b@example.org"], ["a@b", "@x.org"]),
    (string(format="uri"), ["https://example.org/a?b=c#d", "ftp://h", f"x+y://{'a-' * 40}b.c:80/"], URI_BAD),
    (
        string(format="ipv6"),
        ["::1", "2001:db8::ff00:42:8329", "1:2:3:4:5:6:7:8"],
        ["1:2", "::1::2", "1:2:3:4:5:6:7:8:9"],
    ),
    (string(format="duration"), ["P1Y2M", "PT36H", "P4W"], ["P", "1D", "PT"]),
    (string(format="time"), ["23:59:59Z", "08:30:00.123+02:00"], ["24:00:00Z", "08:30"]),
    (integer(minimum=-3, exclusiveMaximum=12), [-3, 0, 11], [-4, 12]),
    (integer(multipleOf=5, minimum=0, maximum=20), [0, 15, 20], [25, 7]),
    (object_({"a": {}}, additionalProperties={"type": "integer"}), [{"a": "x", "b": 1}, {"ab": 1}, {}], [{"b": "x"}]),
    (object_({"a": {}}), [{"a": [1, {"b": None}]}, {}], [{"b": 1}]),
    ({"type": "object", "propertyNames": {"type": "string"}}, [{"a": 1}], [1]),
    ({"type": "object"}, [{}, {"any": {"thing": []}}], [[], "x"]),
    ({"anyOf": [closed(a={"type": "integer"}), {"type": "null"}]}, [{"a": 1}, None], [{"a": "x"}, 3]),
    # `anyOf` behind a reference or in `allOf`, with other keywords beside it
    ({"type": "integer", "allOf": [{"anyOf": [{"minimum": 3}, {"type": "null"}]}]}, [3, 400], [2, None]),
    (
        {"$ref": "#/$defs/a", "type": "integer", "$defs": {"a": {"anyOf": [{"minimum": 3}, {"type": "null"}]}}},
        [3, 400],
        [2, None],
    ),
    ({"allOf": [{"minimum": 3}, {"type": "integer"}]}, [3, 400], [2, 3.5]),
    (
        {"anyOf": [object_({"b": {}}, "b")], "properties": {"a": {}}, "unevaluatedProperties": False},
        [{"b": 1}],
        [{"c": 1}],
    ),
]


@rows("schema, good, bad", *USUAL_VALUES)
def test_usual_values_are_allowed_and_others_are_not(schema, good, bad):
    assert accepted(schema, *good, *bad) == good


@rows(
    "text, is_allowed",
    ('{"a": 1, "b": "x"}', True),
    ('{"a": 1, "a": "x"}', False),
    ('{"a": 1, "\\u0061": "x"}', False),
    ('{"a": 1, "ab": "x", "": "y"}', True),
    ('{"b": "x", "a": 1}', False),
)
def test_a_listed_property_is_written_once_and_in_its_place(text, is_allowed):
    """Under another spelling, too: a reader takes the last value of a name."""
    schema = object_({"a": {"type": "integer"}}, "a", additionalProperties={"type": "string"})
    assert accepts(compile_schema(schema), text) is is_allowed


REFUSED_SCHEMAS = [
    (closed(a={"not": {}}), "properties.a.not"),
    ({"if": {}, "then": {}}, "if"),
    (closed(a={"dependentRequired": {"a": ["b"]}}), "properties.a.dependentRequired"),
    ({"type": "array", "contains": {}}, "contains"),
    ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "items.uniqueItems"),
    ({"anyOf": [{}, {"type": "number", "multipleOf": 0.5}]}, "anyOf[1].multipleOf"),
    (integer(multipleOf=3, minimum=1), "multipleOf"),
    (integer(maximum=2**60), "maximum"),
    ({"enum": [2**60]}, ""),
    ({"enum": [1], "minimum": 0}, "minimum"),
    ({"enum": [[1], 2], "items": {"type": "null"}}, "items"),
    ({"enum": []}, "enum"),
    (string(format="datetime"), "format"),
    (string(format="regex"), "format"),
    (string(pattern="^a", format="uuid"), "format"),
    (string(pattern="^a*b*$", minLength=2), "minLength"),
    (string(pattern="^(?!x)"), "pattern"),
    (string(pattern="(a)\\1"), "pattern"),
    (string(pattern="^a{99999999999}$"), "pattern"),
    (string(pattern="^a{2}{3}$"), "pattern"),
    (string(minLength=-1), "minLength"),
    ({"$ref": "other.json"}, "$ref"),
    ({"$ref": "#/$defs/missing"}, "$ref"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "$defs.a.$ref"),
    ({"oneOf": [integer(), {"type": "number"}]}, "oneOf"),
    ({"oneOf": [object_({"a": {}}), object_({"b": {}})]}, "oneOf"),
    ({"type": "object", "additionalProperties": {}, "minProperties": 2}, "minProperties"),
    ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, "patternProperties.b$"),
    ({"type": "object", "propertyNames": {"not": {}}}, "propertyNames"),
    ({"type": "object", "propertyNames": {"enum": ["a"], "pattern": "b"}}, "propertyNames"),
    ({"type": "object", "propertyNames": {"type": "integer"}}, "propertyNames"),
    (object_({"n_a": {}}, patternProperties={"^n_": {}}), "patternProperties.^n_"),
    ({"type": "object", "patternProperties": {"^n_": {}}, "additionalProperties": {}}, "additionalProperties"),
    ({"type": "array", "prefixItems": {}}, "prefixItems"),
    ({"type": "integer", "minimum": "3"}, "minimum"),
    (False, ""),
    (closed(a=False), ""),
    (string(minLength=5, maxLength=2), ""),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, ""),
    (5, ""),
    ({"properties": {"a": 5}}, "properties.a"),
    ({"anyOf": {}}, "anyOf"),
    ({"type": "object", "required": "a"}, "required"),
    ({"type": [[]]}, "type"),
    ({"type": {}}, "type"),
    (string(format=[]), "format"),
    (closed(a={"format": {}}), "properties.a.format"),
    ({"type": "object", "propertyNames": {"enum": None}}, "propertyNames.enum"),
    ({"type": "object", "propertyNames": {"enum": "abc"}}, "propertyNames.enum"),
    ({"oneOf": [{"type": "object", "properties": None}, {"type": "null"}]}, "oneOf[0].properties"),
    ({"oneOf": [{"type": "object", "required": [[]]}, {"type": "null"}]}, "oneOf[0].required"),
]


@rows("schema, place", *REFUSED_SCHEMAS)
def test_what_cannot_be_honoured_is_refused_with_its_place(schema, place):
    with pytest.raises(SchemaError) as caught:
        prepare_schema(schema)
    assert caught.value.path == place
    assert len(caught.value.reason) > 10


ODD_VALUES = [None, True, 0, -1, 1.5, 2**63, "", "a", "#", [], [[]], [None], ["a"], {}, {"a": 1}, {"a": [[]]}, [{}],
              ["string", {}], {"type": [[]]}, {"enum": 5}, {"format": {}}, {"required": 5}]  # fmt: skip
BESIDE = [{}, {"type": "object"}, {"type": "string"}, {"type": "array"}, {"enum": ["a", 1]}, {"required": ["a"]}]
PLACES = [
    lambda schema: schema,
    lambda schema: closed(a=schema),
    lambda schema: {"type": "array", "prefixItems": [schema]},
    lambda schema: {"type": "object", "propertyNames": schema},
    lambda schema: {"allOf": [schema, {"type": ["string", "object"]}]},
    lambda schema: {"oneOf": [schema, object_({"a": {"const": 1}}, "a")]},
    lambda schema: {"$ref": "#/$defs/a", "$defs": {"a": schema}},
]
KEYWORDS = sorted(
    {*TYPES_OF_KEYWORD, "type", "enum", "const", "anyOf", "allOf", "oneOf", "$ref", "$defs", "$id", "not"}
)


@rows("keyword", *KEYWORDS)
def test_a_keyword_of_any_kind_is_honoured_or_refused(keyword):
    for value, beside, place in product(ODD_VALUES, BESIDE, PLACES):
        with suppress(SchemaError):
            prepare_schema(place({**beside, keyword: value}))


def nested(depth, inner):
    for _ in range(depth):
        inner = {"type": "array", "items": inner}
    return inner


def test_deep_and_large_schemas_are_refused_and_not_crashed_on():
    assert prepare_schema(nested(40, {"type": "null"}))
    for schema in (nested(100, {}), nested(3000, {}), string(pattern="(" * 2000 + ")" * 2000)):
        with pytest.raises(SchemaError):
            prepare_schema(schema)
    wide = {"allOf": [{"anyOf": [{"const": [row, column]} for column in range(12)]} for row in range(12)]}
    doubling = {str(level): {"allOf": [{"$ref": f"#/$defs/{level + 1}"}] * 2} for level in range(30)} | {"30": {}}
    for schema in (wide, {"$ref": "#/$defs/0", "$defs": doubling}):
        with pytest.raises(SchemaError, match="more than"):
            prepare_schema(schema)


PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "[a-c]", "[^ab]", "\\d", "\\w", "\\S", ".", "é", "\\.", '"', "\\\\", " ", '["x]']),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: f"(?:{'|'.join(options)})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{1,2}", "{0,3}", "{2}"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(pattern=PATTERNS, begin=st.sampled_from(["", "^"]), end=st.sampled_from(["", "$"]), seed=st.integers(0, 99))
def test_strings_match_their_pattern(pattern, begin, end, seed):
    whole = f"{begin}{pattern}{end}"
    text = random_text(compile_schema(string(pattern=whole)), seed)
    if text is not None:
        value = json.loads(text)
        assert re.search(whole, value)
        shortest, longest = length_range(parse(whole, is_search=True))
        assert shortest <= len(value) <= (len(value) if longest is None else longest)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(pattern=PATTERNS, text=st.text(alphabet='abcx1. "\\', max_size=8))
def test_matches_agrees_with_python(pattern, text):
    assert matches(parse(pattern, is_search=False), text) == bool(re.fullmatch(pattern, text))


@rows(
    "pattern, reason",
    *((pattern, "at most 10000000 times") for pattern in ("a{99999999999}", "a{0,10000001}", "a{99999999,}")),
    *((pattern, "is repeated") for pattern in ("a{2}{3}", "a*{2}", "a?{2}", "a{2}?{3}", "a{2}+", "a++", "a{2}{3,}")),
    *((pattern, "repeats nothing") for pattern in ("{3}", "({3})", "a|{3,4}", "*a", "(+)")),
    *((pattern, "write '{0,'") for pattern in ("a{,3}", "a{,}", "{,3}")),
    ("a{3,2}", "out of order"),
)
def test_a_repetition_that_is_not_understood_is_refused_and_not_read_as_text(pattern, reason):
    with pytest.raises(PatternError) as caught:
        parse(pattern, is_search=False)
    assert reason in str(caught.value)


BRACES = st.text(alphabet="a{}12,?|()+", max_size=7)


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(pattern=BRACES)
def test_braces_are_read_as_python_reads_them(pattern):
    """What is read matches in Python too, and what Python refuses is refused."""
    try:
        node = parse(pattern, is_search=False)
    except PatternError:
        return
    expression = re.compile(pattern)
    texts = ["", "a", "aa", "1", "a1", "{", "}", "a{", "a{}", "{a}", "{1", "a{1", "1}", ",", "{a}{a}", pattern]
    assert [text for text in texts if matches(node, text) != bool(expression.fullmatch(text))] == []


@rows("pattern", "^(a+)+$", "^((((a*)*)*)*)*$", "^(a|aa)+$", "^(a{0,9}){0,9999}$")
def test_matching_takes_few_steps_where_re_would_take_for_ever(pattern):
    node = parse(pattern, is_search=True)
    assert matches(node, "a" * 120)
    assert not matches(node, "a" * 120 + "!")


@rows("name", *PATTERN_OF_FORMAT)
def test_formats_are_regular_expressions_of_python_too(name):
    """So the table can be read with ordinary tools, and each value found is one of its own pattern."""
    text = random_text(compile_schema(string(format=name)), seed=5)
    assert text is None or re.fullmatch(PATTERN_OF_FORMAT[name], json.loads(text))
