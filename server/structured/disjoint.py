"""Can two branches of a `oneOf` both hold for a value? Only branches that surely exclude each other are accepted.

An answer is bound to one branch. If another branch could hold as well, the answer might break `oneOf`.
"""

import json
from typing import Any

from server.structured.document import Document, Part
from server.structured.errors import Unsatisfiable

_MAX_DEPTH = 6


def are_disjoint(document: Document, left: Part, right: Part, depth: int = 0) -> bool:
    """True if no value can satisfy both parts; False if that is not sure."""
    if depth > _MAX_DEPTH:
        return False
    try:
        lefts, rights = _branches(document, left), _branches(document, right)
    except Unsatisfiable:
        return True
    if lefts is not None or rights is not None:
        pairs = [(a, b) for a in lefts or [left] for b in rights or [right]]
        return all(are_disjoint(document, a, b, depth + 1) for a, b in pairs)
    return _differ(_Facts(document, left), _Facts(document, right), document, depth)


def _branches(document: Document, part: Part) -> list[Part] | None:
    """The branches of a part that has some and nothing else that matters here."""
    parts, _ = document.expand([part])
    for each in parts:
        for keyword in ("anyOf", "oneOf"):
            if keyword in document.at(each):
                return [Part((*each.place, keyword, index)) for index in range(len(document.at(each)[keyword]))]
    return None


class _Facts:
    """What a part surely says about its values."""

    def __init__(self, document: Document, part: Part) -> None:
        parts, _ = document.expand([part])
        self.types: set[str] | None = None
        self.values: list[Any] | None = None
        self.required: set[str] = set()
        self.properties: dict[str, Part] = {}
        self.is_closed = False
        for each in parts:
            schema = document.at(each)
            if "type" in schema:
                types = _types(schema["type"])
                self.types = types if self.types is None else self.types & types
            if "const" in schema or "enum" in schema:
                self.values = [schema["const"]] if "const" in schema else schema["enum"]
            names, required = schema.get("properties"), schema.get("required")
            if isinstance(names, dict):  # what is of a wrong kind says nothing here, and is refused where it is built
                for name in names:
                    self.properties.setdefault(name, Part((*each.place, "properties", name)))
            if isinstance(required, list):
                self.required.update(name for name in required if isinstance(name, str))
            self.is_closed |= schema.get("additionalProperties") is False and "patternProperties" not in schema
        if self.values is not None:
            self.types = {type_of(value) for value in self.values}

    def is_object(self) -> bool:
        return self.types == {"object"} and self.values is None


def _differ(left: _Facts, right: _Facts, document: Document, depth: int) -> bool:
    if left.values is not None and right.values is not None:
        return not {canonical(value) for value in left.values} & {canonical(value) for value in right.values}
    if left.types is not None and right.types is not None and not left.types & right.types:
        return True
    if not (left.is_object() and right.is_object()):
        return False
    for one, other in ((left, right), (right, left)):
        if other.is_closed and one.required - other.properties.keys():
            return True
    common = (left.required & right.required) & left.properties.keys() & right.properties.keys()
    return any(are_disjoint(document, left.properties[n], right.properties[n], depth + 1) for n in sorted(common))


def _types(names: Any) -> set[str]:
    """Types, an integer being a number too."""
    return {"number" if name == "integer" else name for name in ([names] if isinstance(names, str) else names)}


def type_of(value: Any) -> str:
    """The type of a JSON value; every number is a `number`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def canonical(value: Any) -> str:
    """Equal for equal JSON values: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    """The value with whole numbers as integers."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
