"""Schemas whose values would never end: an answer bound to one would grow up to `max_tokens`."""

import json

import pytest

from server.structured.errors import SchemaError
from server.structured.json_schema import prepare_schema
from tests.server.grammar_walk import accepts, compile_schema, random_text
from tests.server.schemas import array, object_
from tests.tables import rows

A, B, ROOT = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"$ref": "#"}
NODE = object_({"next": A}, "next")
UNION = {"anyOf": [A, object_({"next": B}, "next")]}

ENDLESS = [
    (object_({"next": ROOT}, "next"), "properties.next"),
    (array(ROOT, minItems=1), "items"),
    ({"type": "array", "prefixItems": [{"type": "null"}, ROOT], "minItems": 2}, "prefixItems[1]"),
    ({**A, "$defs": {"a": object_({"b": B}, "b"), "b": object_({"a": A}, "a")}}, "the root"),
    ({"anyOf": [A, B], "$defs": {"a": NODE, "b": array(B, minItems=3)}}, "anyOf[1]"),
    (object_({"x": A}, "x", **{"$defs": {"a": {"allOf": [NODE, {"properties": {"y": {}}}]}}}), "properties.x"),
]


@rows("schema, place", *ENDLESS)
def test_a_schema_without_a_value_that_ends_is_refused_with_the_place(schema, place):
    with pytest.raises(SchemaError, match="no value satisfies") as caught:
        prepare_schema(schema)
    assert f"at {place}, each value needs another" in caught.value.reason


@rows(
    "schema",
    object_({"a": ROOT, "b": {}}, additionalProperties=False, minProperties=2),
    object_({}, additionalProperties=ROOT, minProperties=1),
)
def test_properties_that_never_end_do_not_count(schema):
    with pytest.raises(SchemaError, match="an object with"):
        prepare_schema(schema)


DEFINITIONS = {"$defs": {"a": NODE, "b": object_({"x": False}, "x")}}
WITH_AN_END = [
    # a branch, an optional property or further items without an end are left out
    ({"anyOf": [A, {"type": "null"}], **DEFINITIONS}, [None], [{"next": None}]),
    (object_({"a": A, "c": {"type": "null"}}, **DEFINITIONS), [{}, {"c": None}], [{"a": {}}]),
    ({"type": "array", "items": A, **DEFINITIONS}, [[]], [[{}]]),
    ({"type": "array", "prefixItems": [{"type": "null"}, A], **DEFINITIONS}, [[None], []], [[None, {}]]),
    # an optional property, an empty array and a null end what may go on
    (object_({"next": ROOT}), [{}, {"next": {"next": {}}}], [{"next": 1}]),
    (array(ROOT), [[], [[], [[]]]], [[1]]),
    (object_({"next": {"anyOf": [ROOT, {"type": "null"}]}}, "next"), [{"next": {"next": None}}], [{}]),
    # what is known to have no value refers to a part that is used elsewhere, and that refers back to it
    (
        object_(
            {"a": A, "b": B},
            **{"$defs": {"a": object_({"b": B, "x": False}, "x"), "b": object_({"a": A, "c": {"const": 1}})}},
        ),
        [{}, {"b": {}}, {"b": {"c": 1}}],
        [{"a": {}}, {"b": {"a": {}}}],
    ),
    # a union inside another one that it names allows less there than elsewhere, and nothing with an end
    (
        object_({"a": A, "b": B}, "a", "b", **{"$defs": {"a": {"anyOf": [B, {"type": "null"}]}, "b": UNION}}),
        [{"a": None, "b": None}, {"a": {"next": None}, "b": {"next": {"next": None}}}],
        [{"a": None, "b": {}}],
    ),
]


@rows("schema, good, bad", *WITH_AN_END)
def test_only_values_that_end_are_allowed(schema, good, bad):
    grammar = compile_schema(schema)
    assert [value for value in [*good, *bad] if accepts(grammar, json.dumps(value))] == good
    assert all(random_text(grammar, seed) is not None for seed in range(3))
