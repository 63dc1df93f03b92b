"""`Document`: a client's JSON Schema, its parts by place, with references and `allOf` resolved.

Several parts may hold for one value: a schema, what its `$ref` points to, the members of its `allOf`. `Document.expand`
finds them all. Keywords that cannot be honoured are refused here, where every part comes by.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from server.structured.errors import SchemaError, Unsatisfiable

Place = tuple[str | int, ...]
"""Keys and indices that lead from the root to a part."""

MAX_DEPTH = 64
MAX_PARTS = 20_000
_MAX_VISITS = 50_000

TYPES_OF_KEYWORD = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems"), "array"),
    "uniqueItems": "array",
    **dict.fromkeys(("properties", "required", "additionalProperties", "unevaluatedProperties"), "object"),
    **dict.fromkeys(("patternProperties", "propertyNames", "minProperties", "maxProperties"), "object"),
}
"""Keywords that constrain values of one type, and that type."""

_KEYWORDS = frozenset({*TYPES_OF_KEYWORD, "type", "enum", "const", "anyOf", "oneOf"})
_REFUSED = {
    **dict.fromkeys(("not", "if", "then", "else"), "conditions on other parts of the answer are not supported"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), "dependencies are not supported"),
    **dict.fromkeys(("contains", "minContains", "maxContains"), "it is not supported: describe every item in items"),
    **dict.fromkeys(
        ("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$anchor"),
        "anchors are not supported: refer to parts as '#/$defs/name'",
    ),
}
_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})


class Part(NamedTuple):
    """A schema in the document, without the keywords in `done`, which others deal with."""

    place: Place
    done: frozenset[str] = frozenset()


class Document:
    """The schema of a request."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._num_visits = 0

    def at(self, part: Part) -> dict[str, Any]:
        """The keywords of a part that are still to be dealt with."""
        schema = self._find(part.place)
        return {key: value for key, value in schema.items() if key in _KEYWORDS and key not in part.done}

    def expand(self, parts: Iterable[Part]) -> tuple[list[Part], bool]:
        """All parts that hold for a value for which these hold, and whether a reference was followed.

        Raises:
            SchemaError: a keyword is wrong or not supported, or a reference leads nowhere or to itself.
            Unsatisfiable: a part is `false`.
        """
        found: dict[Part, None] = {}
        followed = False

        def visit(part: Part, above: tuple[Place, ...]) -> None:
            nonlocal followed
            self._num_visits += 1
            if self._num_visits > _MAX_VISITS:
                raise SchemaError(path_of(part.place), f"written out, the schema has more than {MAX_PARTS} parts")
            schema = self._find(part.place)
            if schema is False:
                raise Unsatisfiable("a schema that is false allows no value")
            if schema is True:
                return
            self._check(part.place, schema)
            if self.at(part):
                found[part] = None
            if "$ref" in schema and "$ref" not in part.done:
                target = self._target(part.place, schema["$ref"])
                if target in above:
                    raise SchemaError(path_of((*part.place, "$ref")), "it refers to itself")
                followed = True
                visit(Part(target), (*above, target))
            if "allOf" not in part.done:
                for index in range(len(schema.get("allOf", ()))):
                    visit(Part((*part.place, "allOf", index)), above)

        for part in parts:
            visit(part, (part.place,))
        return list(found), followed

    def _find(self, place: Place) -> Any:
        schema = self.root
        for step in place:
            schema = schema[step]
        return schema

    def _check(self, place: Place, schema: Any) -> None:
        if not isinstance(schema, dict):
            raise SchemaError(path_of(place), "a schema must be an object or a boolean")
        if len(place) > 2 * MAX_DEPTH:
            raise SchemaError(path_of(place[:4]), f"it is nested more than {MAX_DEPTH} deep")
        for keyword, reason in _REFUSED.items():
            if keyword in schema:
                raise SchemaError(path_of((*place, keyword)), reason)
        if place and isinstance(schema.get("$id"), str):
            raise SchemaError(path_of((*place, "$id")), "only the whole schema may have an id")
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword in schema and not (isinstance(schema[keyword], list) and schema[keyword]):
                raise SchemaError(path_of((*place, keyword)), "it must be a list with at least one schema")
        types = schema.get("type", [])
        for name in types if isinstance(types, list) else [types]:
            if not isinstance(name, str) or name not in _TYPES:
                raise SchemaError(
                    path_of((*place, "type")), f"it must be one or several of {', '.join(sorted(_TYPES))}"
                )
        if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
            raise SchemaError(path_of((*place, "enum")), "it must be a list with at least one value")

    def _target(self, place: Place, reference: Any) -> Place:
        where = path_of((*place, "$ref"))
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise SchemaError(where, "only references within the schema, such as '#/$defs/name', are supported")
        target: list[str | int] = []
        schema = self.root
        for escaped in reference.split("/")[1:]:
            name = unquote(escaped).replace("~1", "/").replace("~0", "~")
            step: str | int = int(name) if isinstance(schema, list) and name.isdigit() else name
            try:
                schema = schema[step]
            except (LookupError, TypeError):
                raise SchemaError(where, f"the schema has nothing at '{reference[:200]}'") from None
            target.append(step)
        return tuple(target)


def path_of(place: Sequence[str | int]) -> str:
    """`properties.x.anyOf[0]` from ("properties", "x", "anyOf", 0)."""
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f"{'.' if text else ''}{step[:64]}"
    return text


def integer_at(place: Place, schema: dict[str, Any], keyword: str) -> int | None:
    """A count, such as `minItems`; None if it is missing. Raises SchemaError if it is no natural number."""
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise SchemaError(path_of((*place, keyword)), "it must be a natural number")
    return int(value)
