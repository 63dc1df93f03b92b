"""`finite_definitions`: the definitions of a rewritten schema that a value with an end can satisfy.

A node whose required `next` is such a node again has no value with an end: an answer would grow up to `max_tokens`.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

DEFINITIONS = "#/$defs/"


def finite_definitions(definitions: Mapping[str, Any]) -> set[str]:
    """Names of the definitions that a value with an end satisfies; none of those that refer to a missing one.

    It is the least fixed point: a definition has such a value if what it needs is known to have one. References are
    nested at most `MAX_DEPTH` deep, so a few rounds find all.
    """
    finite: set[str] = set()
    num_found = -1
    while len(finite) > num_found:
        num_found = len(finite)
        for name, schema in definitions.items():
            if name not in finite and _can_end(schema, finite):
                finite.add(name)
    return finite


def _can_end(schema: Any, finite: Collection[str]) -> bool:
    """Whether a value with an end satisfies a schema, if those of the `finite` definitions alone have one."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return schema["$ref"].removeprefix(DEFINITIONS) in finite
    if "anyOf" in schema:
        return any(_can_end(branch, finite) for branch in schema["anyOf"])
    match schema.get("type"):
        case "object":
            return _object_can_end(schema, finite)
        case "array":
            heads, low = schema.get("prefixItems", []), schema["minItems"]
            has_enough = low <= len(heads) or _can_end(schema["items"], finite)
            return has_enough and all(_can_end(head, finite) for head in heads[:low])
    return True


def _object_can_end(schema: Mapping[str, Any], finite: Collection[str]) -> bool:
    properties: dict[str, Any] = schema["properties"]
    low: int = schema.get("minProperties", 0)
    if not all(_can_end(properties[name], finite) for name in schema["required"]):
        return False
    others = [schema["additionalProperties"], *schema.get("patternProperties", {}).values()]
    is_open = low > 0 and any(_can_end(other, finite) for other in others)
    num_possible = math.inf if is_open else sum(_can_end(each, finite) for each in properties.values()) if low else 0
    return num_possible >= low
