"""Where in a JSON schema the part is that xgrammar refuses; its own message does not say."""

import json
from collections.abc import Callable, Iterator
from typing import Any

_SHARED = ("$defs", "definitions")  # what a part may refer to; looked at first, so that a reference is followed
_BY_NAME = (*_SHARED, "properties", "patternProperties", "dependentSchemas")
_BY_NUMBER = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalProperties", "unevaluatedProperties", "propertyNames", "contains", "not")
_REFUSES = Callable[[dict[str, Any]], str | None]


def find_fault(format_json: str, reason_of: _REFUSES) -> str | None:
    """The path of the smallest refused part of the first refused schema, such as "properties.a.items".

    `reason_of` says why a schema is refused, None if it is not. None where no schema is, or where it is refused as a
    whole.
    """
    for schema in _schemas(json.loads(format_json)):
        reason = reason_of(schema)
        if reason is not None:
            return ".".join(_path_to(schema, reason, reason_of, schema)) or None
    return None


def _schemas(format_: Any) -> Iterator[dict[str, Any]]:
    """The schemas in a format, in order."""
    if isinstance(format_, list):
        for each in format_:
            yield from _schemas(each)
    elif isinstance(format_, dict):
        if format_.get("type") == "json_schema":
            if isinstance(format_.get("json_schema"), dict):
                yield format_["json_schema"]
        else:
            for each in format_.values():
                yield from _schemas(each)


def _path_to(schema: dict[str, Any], reason: str, reason_of: _REFUSES, root: dict[str, Any]) -> list[str]:
    """Steps down to the smallest part that is refused for the same reason. Parts that nothing uses are not refused."""
    shared = {name: root[name] for name in _SHARED if name in root}
    for steps, part in _parts(schema):
        if reason_of({**shared, **part}) == reason:
            return [*steps, *_path_to(part, reason, reason_of, root)]
    return []


def _parts(schema: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The schemas right inside a schema, with the steps that lead to them."""
    for name in _BY_NAME:
        if isinstance(schema.get(name), dict):
            yield from (([name, key], part) for key, part in schema[name].items() if isinstance(part, dict))
    for name in _BY_NUMBER:
        if isinstance(schema.get(name), list):
            yield from (([name, str(n)], part) for n, part in enumerate(schema[name]) if isinstance(part, dict))
    yield from (([name], schema[name]) for name in _SINGLE if isinstance(schema.get(name), dict))
