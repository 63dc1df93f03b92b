"""JSON Schemas that answers must satisfy, by name. Each is honoured: none is refused, and none is weakened."""

from collections.abc import Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

Schema = dict[str, Any]
INTEGER: Schema = {"type": "integer"}
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def string(**rules: Any) -> Schema:
    return {"type": "string", **rules}


def integer(**rules: Any) -> Schema:
    return {"type": "integer", **rules}


def number(**rules: Any) -> Schema:
    return {"type": "number", **rules}


def array(items: Any = None, **rules: Any) -> Schema:
    return {"type": "array", **({} if items is None else {"items": items}), **rules}


def object_(properties: Schema, *required: str, **rules: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), **rules}


def closed(**properties: Any) -> Schema:
    """As OpenAI's strict mode wants them: all properties required, no others."""
    return object_(properties, *properties, additionalProperties=False)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blau"


class Address(BaseModel):
    street: str = Field(min_length=1, max_length=20)
    postcode: str = Field(pattern=r"^\d{5}$")
    country: Literal["DE", "FR", "IT"] = "DE"


class Person(BaseModel):
    name: str
    age: int = Field(ge=0, le=150)
    address: Address
    tags: list[str] = Field(default_factory=list, max_length=3)
    colour: Colour | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(gt=0, lt=10)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str | None


class Zoo(BaseModel):
    animals: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = Field(min_length=1, max_length=3)


class Tree(BaseModel):
    value: int
    left: "Tree | None" = None
    right: "Tree | None" = None


class Event(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: UUID
    day: date
    at: datetime
    takes: timedelta
    price: Decimal | None = None
    place: tuple[float, float]
    scores: dict[str, int]


def _strings() -> Iterator[tuple[str, Schema]]:
    yield "plain", STRING
    for low, high in ((0, 0), (1, 1), (0, 5), (3, 3), (2, 40), (0, 5000)):
        yield f"length {low} to {high}", string(minLength=low, maxLength=high)
    yield "at least 12", string(minLength=12)
    patterns = (
        "^a", "b$", "c", "^[a-z]+$", "^[A-Z]{2}-\\d{4}$", "^(red|green|blue)$", "^x|y$", "^\\S+$", "^\\w+@\\w+\\.com$",
        "^[^aeiou]{3,6}$", "^(?:ab)*$", "^a?b+c{2,}$", "^[\\w.-]{1,8}$", "^.{3}$", "^é+$", "^[à-ÿ]{2}$", "^[一-龥]{2}$",
        "^\\u00e9😀$", "^[\"\\\\]$", "^\"q\"$", "^\\(\\d+\\)$", "^\\$\\d+(?:\\.\\d{2})?$", "^(?P<y>\\d{4})$", "^a|b|$",
        "^#[0-9a-fA-F]{6}$", "^(?:\\d{1,3}\\.){3}\\d{1,3}$", "^\\D\\W$", "^[^\\s]{2}$", "^[\\]a-]$", "^\\n$",
        "^(?:(?:x[0-9]{1,2})?y)+$", "^[^\\W\\d_]+$", "^a{0}b{1}$", "", "^$", "^\\x41\\t?$", "^-?\\d+$", "^.*\\S.*$",
    )  # fmt: skip
    for pattern in patterns:
        yield f"pattern {pattern}", string(pattern=pattern)
    yield "pattern and lengths", string(pattern="^[a-z]+$", minLength=2, maxLength=4)
    yield "pattern with a prefix and a length", string(pattern="^id-", maxLength=8)
    formats = (
        "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "json-pointer",
        "relative-json-pointer", "idn-email", "uri-reference", "password",
    )  # fmt: skip
    for name in formats:
        yield f"format {name}", string(format=name)
    yield "format and length", string(format="date", maxLength=10)


def _numbers() -> Iterator[tuple[str, Schema]]:
    yield "integer", INTEGER
    yield "number", number()
    bounds: tuple[Schema, ...] = (
        {"minimum": 0}, {"maximum": 0}, {"minimum": -5, "maximum": 5}, {"exclusiveMinimum": 0}, {"minimum": 1e3},
        {"exclusiveMaximum": -1}, {"minimum": 7, "maximum": 7}, {"minimum": 95, "maximum": 1234},
        {"exclusiveMinimum": 9, "exclusiveMaximum": 11}, {"minimum": -1000000},
        {"minimum": 0, "exclusiveMinimum": 0, "maximum": 3},
    )  # fmt: skip
    for rules in bounds:
        yield f"integer {rules}", integer(**rules)
        yield f"number {rules}", number(**rules)
    for rules in ({"minimum": 0.5, "maximum": 1.25}, {"exclusiveMinimum": -0.1, "maximum": 0.001}, {"maximum": 1e-6}):
        yield f"number {rules}", number(**rules)
        yield f"one number {rules}", closed(value=number(**rules))
    yield "integer with halves", integer(minimum=0.5, maximum=3.5)
    yield "multiples", integer(multipleOf=7)
    yield "multiples in bounds", integer(multipleOf=5, minimum=-12, maximum=32)
    yield "number multiples", number(multipleOf=2)


def _objects() -> Iterator[tuple[str, Schema]]:
    yield "empty", closed()
    yield "any object", {"type": "object"}
    yield "one", closed(a=INTEGER)
    yield "optional", object_({"a": INTEGER, "b": STRING, "c": BOOLEAN})
    yield "optional between", object_({"a": INTEGER, "b": STRING, "c": BOOLEAN}, "b")
    yield "required without schema", object_({"a": INTEGER}, "z")
    yield "open", object_({"a": INTEGER, "ab": BOOLEAN}, "a", additionalProperties=True)
    yield "open with a type", object_({"a": INTEGER, "abc": BOOLEAN, "": NULL}, additionalProperties=STRING)
    yield "map", {"type": "object", "additionalProperties": INTEGER}
    yield "map of maps", {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": BOOLEAN}}
    yield "map with names", {"type": "object", "propertyNames": string(pattern="^[a-c]$"), "additionalProperties": NULL}
    yield (
        "map of listed names",
        {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": INTEGER},
    )
    yield "names by pattern", {"type": "object", "patternProperties": {"^n_": INTEGER}, "additionalProperties": False}
    yield "named and by pattern", object_({"a": INTEGER}, "a", patternProperties={"^n_": STRING})
    yield "at least two", object_({"a": INTEGER, "b": INTEGER, "c": INTEGER}, minProperties=2)
    yield "at most one", object_({"a": INTEGER, "b": INTEGER, "c": INTEGER}, maxProperties=1)
    yield "not empty", {"type": "object", "additionalProperties": INTEGER, "minProperties": 1}
    yield "no such property", object_({"a": INTEGER, "b": False}, "a")
    for name in ('quote"', "back\\slash", "line\nbreak", "ключ", "名前", "😀", "a/b", "a.b", "$ref", "type", " "):
        yield f"name {name}", closed(**{name: INTEGER})
    yield "without type", {"properties": {"a": INTEGER}, "required": ["a"]}
    yield "unevaluated", object_({"a": INTEGER}, "a", unevaluatedProperties=False)
    nested: Schema = INTEGER
    for level in range(12):
        nested = closed(**{f"level{level}": nested})
    yield "twelve deep", nested
    yield (
        "forty properties",
        closed(**{f"field_{index}": [INTEGER, STRING, BOOLEAN, NULL][index % 4] for index in range(40)}),
    )


def _arrays() -> Iterator[tuple[str, Schema]]:
    yield "any array", array()
    yield "integers", array(INTEGER)
    for low, high in ((0, 0), (1, 1), (0, 2), (2, 4), (3, 3)):
        yield f"{low} to {high} items", array(BOOLEAN, minItems=low, maxItems=high)
    yield "at least three", array(INTEGER, minItems=3)
    yield "matrix", array(array(number(minimum=0, maximum=1), minItems=2, maxItems=2), minItems=2, maxItems=2)
    yield "tuple", array(False, prefixItems=[INTEGER, STRING, BOOLEAN])
    yield "tuple and more", array(STRING, prefixItems=[INTEGER], minItems=2, maxItems=3)
    yield "tuple of 2019", {"type": "array", "prefixItems": [INTEGER, NULL]}
    yield "cut tuple", array(prefixItems=[INTEGER, STRING, BOOLEAN], maxItems=2)
    yield "objects", array(closed(id=integer(minimum=1), name=STRING), minItems=1, maxItems=2)
    yield "one unique item", array(INTEGER, uniqueItems=True, maxItems=1)
    yield "of choices", array({"enum": ["a", "b", "c"]}, minItems=1, maxItems=3)


def _choices() -> Iterator[tuple[str, Schema]]:
    enums = (
        ["a"], ["yes", "no", "maybe"], [1, 2, 3], [None], [True, False], [1.5, -2, 1e20],
        ["é", "日本", "😀", 'q"', "\n", ""],
        [{"a": 1}, {"b": [1, None, {"c": "d"}]}], [[], [1, 2]], ["a", 1, None, True, 0.5],
    )  # fmt: skip
    for values in enums:
        yield f"enum {values}", {"enum": values}
    for value in ("fixed", 42, None, False, {"deep": {"er": [1, "2"]}}, "new\nline"):
        yield f"const {value}", closed(value={"const": value})
    yield "enum with a type", {"type": "string", "enum": ["a", "b", 3]}
    yield "nullable", closed(value={"type": ["string", "null"], "maxLength": 5})
    yield "several types", {"type": ["integer", "string", "boolean"], "maximum": 5, "pattern": "^s"}
    yield "any of scalars", {"anyOf": [INTEGER, string(maxLength=3), NULL]}
    yield "any of objects", {"anyOf": [closed(a=INTEGER), closed(b=STRING), closed(a=STRING, c=BOOLEAN)]}
    yield (
        "any of with siblings",
        {
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            **object_({"a": INTEGER, "b": STRING}),
        },
    )
    yield "one of types", {"oneOf": [INTEGER, STRING, array(INTEGER, maxItems=2)]}
    yield "one of constants", {"oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]}
    yield (
        "one of kinds",
        {"oneOf": [closed(kind={"const": "x"}, v=INTEGER), closed(kind={"enum": ["y", "z"]}, w=STRING)]},
    )
    yield "one of closed objects", {"oneOf": [closed(a=INTEGER), closed(b=INTEGER)]}
    yield (
        "nested unions",
        {"anyOf": [{"anyOf": [INTEGER, NULL]}, {"oneOf": [BOOLEAN, closed(u={"anyOf": [NULL, STRING]})]}]},
    )
    yield "all of bounds", {"allOf": [integer(minimum=3), {"maximum": 9}, {"exclusiveMaximum": 9}]}
    yield "all of objects", {"allOf": [object_({"a": INTEGER}, "a"), object_({"b": STRING, "a": {"maximum": 5}}, "b")]}
    yield "all of any of", {"allOf": [{"anyOf": [INTEGER, STRING]}, {"anyOf": [STRING, BOOLEAN]}]}


def _references() -> Iterator[tuple[str, Schema]]:
    short = {"short": string(minLength=1, maxLength=4)}
    yield "definition", {"$ref": "#/$defs/short", "$defs": short}
    yield "old definition", {**closed(a={"$ref": "#/definitions/short"}), "definitions": short}
    yield "reference with siblings", {"$defs": short, **closed(a={"$ref": "#/$defs/short", "maxLength": 2})}
    yield "reference into properties", closed(a=integer(minimum=3, maximum=4), b={"$ref": "#/properties/a"})
    yield "escaped reference", {"$defs": {"a/b~c": INTEGER}, **array({"$ref": "#/$defs/a~1b~0c"})}
    yield (
        "reference by all of",
        {"$defs": short, **closed(a={"allOf": [{"$ref": "#/$defs/short"}], "description": "d"})},
    )
    yield (
        "list",
        {
            "$defs": {"node": closed(value=INTEGER, next={"anyOf": [{"$ref": "#/$defs/node"}, NULL]})},
            "$ref": "#/$defs/node",
        },
    )
    yield "recursive root", object_({"name": string(maxLength=5), "children": array({"$ref": "#"}, maxItems=2)}, "name")
    yield (
        "mutual recursion",
        {
            "$defs": {
                "even": {"anyOf": [NULL, closed(odd={"$ref": "#/$defs/odd"})]},
                "odd": {"anyOf": [BOOLEAN, closed(even={"$ref": "#/$defs/even"})]},
            },
            "$ref": "#/$defs/even",
        },
    )
    yield (
        "recursion with a sibling",
        {
            "$defs": {"item": object_({"id": INTEGER, "in": {"$ref": "#/$defs/item", "required": ["id"]}})},
            "$ref": "#/$defs/item",
        },
    )
    for model in (Address, Person, Zoo, Tree, Event):
        yield f"pydantic {model.__name__}", model.model_json_schema()


def _annotated() -> Iterator[tuple[str, Schema]]:
    notes = {"title": "T", "description": "D", "default": 1, "examples": [2], "deprecated": True, "x-order": 3}
    yield (
        "notes",
        {**notes, "$schema": "https://json-schema.org/draft/2020-12/schema", **closed(a={**INTEGER, **notes})},
    )
    yield "anything", {}
    yield "named notes", closed(a={"title": "T"}, b={"description": "D"})
    yield "notes only", {"title": "T", "examples": [1]}
    yield "formats of numbers", closed(a=integer(format="int32"), b=number(format="double"))
    yield (
        "weather call",
        closed(
            location=string(description="City and country"), units={"type": "string", "enum": ["celsius", "fahrenheit"]}
        ),
    )
    yield (
        "steps",
        closed(
            steps=array(closed(explanation=string(maxLength=20), output=string(maxLength=10)), minItems=1, maxItems=2),
            final_answer=string(maxLength=10),
        ),
    )
    yield (
        "invoice",
        closed(
            number=string(pattern="^INV-\\d{4}$"),
            date=string(format="date"),
            lines=array(
                closed(text=string(maxLength=9), cents=integer(minimum=0, maximum=99999)), minItems=1, maxItems=2
            ),
            currency={"enum": ["EUR", "USD", "GBP"]},
            paid={"type": ["boolean", "null"]},
        ),
    )


GROUPS = {
    "string": _strings, "number": _numbers, "object": _objects, "array": _arrays, "choice": _choices,
    "reference": _references, "annotated": _annotated,
}  # fmt: skip
SCHEMAS: dict[str, Schema] = {f"{group}: {name}": schema for group, make in GROUPS.items() for name, schema in make()}
