"""Arrays and objects of a JSON Schema, merged from all parts that hold for the value, in the compiler's terms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.structured.document import Part, Place, integer_at, path_of
from server.structured.errors import PatternError, SchemaError, Unsatisfiable
from server.structured.pattern import MAX_COUNT, Node, matches, parse
from server.structured.pattern_text import names_except, text_of
from server.structured.scalars import Schemas, string_tree

Build = Callable[[Sequence[Part]], dict[str, Any]]
"""The schema for a value for which all these parts hold, in the compiler's terms. May raise `Unsatisfiable`."""

_MAX_NAME_CHARS = 128
_RULES_FOR_NAMES = frozenset({"pattern", "format", "minLength", "maxLength"})
_NOT_FOR_NAMES = frozenset({"$ref", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"})


def array(schemas: Schemas, build: Build) -> dict[str, Any]:
    """An array: the first items each by its own schema, the others by `items`. All first items are written, or none.

    Raises:
        SchemaError: unique items, or counts that are none.
        Unsatisfiable: no length is allowed.
    """
    low, high = _counts(schemas, "minItems", "maxItems")
    tuples = [_first_items(place, each) for place, each in schemas]
    heads: list[dict[str, Any]] = []
    reason = ""
    for index in range(max(map(len, tuples), default=0)):
        parts = [_item_at(place, each, head, index) for (place, each), head in zip(schemas, tuples, strict=True)]
        try:
            heads.append(build([part for part in parts if part is not None]))
        except Unsatisfiable as error:
            high, reason = min(high, index), f": {error}"
            break
    heads = heads[:high]
    rest = [_item_at(place, each, head, None) for (place, each), head in zip(schemas, tuples, strict=True)]
    if any(each.get("uniqueItems") for _, each in schemas) and high > 1:
        place = next(place for place, each in schemas if each.get("uniqueItems"))
        raise SchemaError(path_of((*place, "uniqueItems")), "it is not supported, except with maxItems: 1")
    is_open = not heads or any(rest) or low > len(heads)
    items: dict[str, Any] | bool = False
    if is_open and high > len(heads):
        try:
            items = build([part for part in rest if part is not None])
        except Unsatisfiable as error:
            reason = f": {error}"
    if items is False:
        high = min(high, len(heads))
    if low > high:
        raise Unsatisfiable(f"an array cannot have at least {low} and at most {high} items{reason}")
    built: dict[str, Any] = {"type": "array", "items": items, "minItems": low}
    return built | ({"prefixItems": heads} if heads else {}) | ({"maxItems": high} if high < MAX_COUNT else {})


def _first_items(place: Place, schema: dict[str, Any]) -> list[Part]:
    """Parts of the items that have schemas of their own: `prefixItems`, or a list under `items` (before 2020)."""
    if not isinstance(schema.get("prefixItems", []), list):
        raise SchemaError(path_of((*place, "prefixItems")), "it must be a list")
    for keyword in ("prefixItems", "items"):
        if isinstance(schema.get(keyword), list):
            return [Part((*place, keyword, index)) for index in range(len(schema[keyword]))]
    return []


def _item_at(place: Place, schema: dict[str, Any], head: list[Part], index: int | None) -> Part | None:
    """The part for the item at an index, or for the items after all that have their own; None if it may be anything."""
    if index is not None and index < len(head):
        return head[index]
    keywords = ["additionalItems"] if isinstance(schema.get("items"), list) else ["items"]
    found = next((each for each in (*keywords, "unevaluatedItems") if each in schema), None)
    return None if found is None else Part((*place, found))


def _counts(schemas: Schemas, low_keyword: str, high_keyword: str) -> tuple[int, int]:
    lows, highs = [0], [MAX_COUNT]
    for place, each in schemas:
        low, high = integer_at(place, each, low_keyword), integer_at(place, each, high_keyword)
        if low is not None and low > MAX_COUNT:
            raise SchemaError(path_of((*place, low_keyword)), f"at most {MAX_COUNT} are supported")
        lows += [] if low is None else [low]
        highs += [] if high is None else [high]
    if max(lows) > min(highs):
        raise Unsatisfiable(f"{low_keyword} {max(lows)} exceeds {high_keyword} {min(highs)}")
    return max(lows), min(highs)


@dataclass(slots=True)
class _OtherNames:
    """Properties without a schema of their own: what their names match, and the parts for their values."""

    names: Node | None = None
    parts: list[Part] = field(default_factory=list)


def object_(schemas: Schemas, build: Build) -> dict[str, Any]:
    """An object: named properties in their order, then others if they are allowed.

    Without `additionalProperties`, an object with `properties` or `patternProperties` has no others.

    Raises:
        SchemaError: rules for names that cannot be combined.
        Unsatisfiable: a required property cannot exist, or too many are required.
    """
    low, high = _counts(schemas, "minProperties", "maxProperties")
    for place, each in schemas:
        _check_object(place, each)
    required = {name for _, each in schemas for name in each.get("required", ())}
    names = dict.fromkeys(
        name for _, each in schemas for name in [*each.get("properties", ()), *each.get("required", ())]
    )
    allowed, others = _other_names(schemas, list(names))
    if others is not None and allowed is not None:
        names |= dict.fromkeys(name for name in allowed if name not in names)
    properties: dict[str, Any] = {}
    for name in names:
        try:
            if allowed is not None and name not in allowed:
                raise Unsatisfiable("propertyNames does not allow it")
            properties[name] = build(_parts_of_name(schemas, name))
        except Unsatisfiable as error:
            if name in required:
                raise Unsatisfiable(f"the required property '{name[:64]}': {error}") from None
    if len(required) > high:
        raise Unsatisfiable(f"{len(required)} properties are required and at most {high} are allowed")
    built: dict[str, Any] = {"type": "object", "properties": properties, "required": sorted(required)}
    built["additionalProperties"] = False
    if others is not None and allowed is None:
        built |= _open(schemas, others, list(names), build)
    return built | _property_counts(schemas, built, low, high)


def _check_object(place: Place, schema: dict[str, Any]) -> None:
    for keyword in ("properties", "patternProperties"):
        if not isinstance(schema.get(keyword, {}), dict):
            raise SchemaError(path_of((*place, keyword)), "it must be an object")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise SchemaError(path_of((*place, "required")), "it must be a list of names")


def _parts_of_name(schemas: Schemas, name: str) -> list[Part]:
    """All parts that hold for the value of a named property."""
    parts = []
    for place, each in schemas:
        if name in each.get("properties", ()):
            parts.append(Part((*place, "properties", name)))
        elif "additionalProperties" in each:
            parts.append(Part((*place, "additionalProperties")))
        elif "unevaluatedProperties" in each and not any(name in other.get("properties", ()) for _, other in schemas):
            parts.append(Part((*place, "unevaluatedProperties")))
    return parts


def _additional(schema: dict[str, Any]) -> str | None:
    return next((each for each in ("additionalProperties", "unevaluatedProperties") if each in schema), None)


def _other_names(schemas: Schemas, names: list[str]) -> tuple[list[str] | None, _OtherNames | None]:
    """The names that `propertyNames` lists, if it does, and the rule for other properties; None: there are none."""
    others = _OtherNames()
    allowed: list[str] | None = None
    is_open = not names or not any("properties" in each for _, each in schemas)
    rules: list[Place] = []
    for place, each in schemas:
        for pattern in each.get("patternProperties", ()):
            rules.append((*place, "patternProperties", pattern))
            others.names = string_tree([((*place, "patternProperties"), {"pattern": pattern})])
            others.parts.append(Part(rules[-1]))
        keyword = _additional(each)
        if "patternProperties" not in each and keyword is not None:
            others.parts.append(Part((*place, keyword)))
        elif each.get("additionalProperties", False) is not False:
            reason = "beside patternProperties it must be false"
            raise SchemaError(path_of((*place, "additionalProperties")), reason)
        listed, names_match = _rule_for_names((*place, "propertyNames"), each.get("propertyNames", True))
        if listed is not None:
            allowed = [name for name in listed if allowed is None or name in allowed]
        elif names_match is not None:
            rules.append((*place, "propertyNames"))
            others.names = names_match
    overlaps = bool(rules) and any(rules[-1][-1] == "propertyNames" or _finds(rules[-1], name) for name in names)
    if len(rules) > 1 or overlaps or (rules and allowed is not None):
        raise SchemaError(path_of(rules[-1]), "it cannot be combined with other rules for the names of properties")
    return allowed, others if is_open or others.parts else None


def _rule_for_names(place: Place, rule: Any) -> tuple[list[str] | None, Node | None]:
    """What `propertyNames` says: the names that it lists, or what names must match."""
    if rule is True:
        return None, None
    keywords = rule.keys() if isinstance(rule, dict) else _NOT_FOR_NAMES
    is_list, is_text = bool(keywords & {"enum", "const"}), bool(keywords & _RULES_FOR_NAMES)
    if (is_list and is_text) or keywords & _NOT_FOR_NAMES or rule.get("type", "string") != "string":
        raise SchemaError(path_of(place), "only enum, or else pattern, format and lengths are supported")
    if not is_list:
        return None, string_tree([(place, rule)])
    listed = rule["enum"] if "enum" in rule else [rule["const"]]
    if not isinstance(listed, list):
        raise SchemaError(path_of((*place, "enum")), "it must be a list with at least one value")
    return [name for name in listed if isinstance(name, str)], None


def _finds(rule: Place, name: str) -> bool:
    """Whether the pattern at a place, known to be valid, is found in a name."""
    try:
        return matches(parse(str(rule[-1]), is_search=True), name)
    except PatternError as error:
        raise SchemaError(path_of(rule), str(error)) from None


def _open(schemas: Schemas, others: _OtherNames, names: list[str], build: Build) -> dict[str, Any]:
    """Keywords that allow properties without names; none if no value fits them."""
    try:
        value = build(others.parts)
    except Unsatisfiable:
        return {}
    if others.names is None and not names:
        return {"additionalProperties": value}
    if any(len(name) > _MAX_NAME_CHARS for name in names):
        reason = f"names of more than {_MAX_NAME_CHARS} characters are not supported beside additionalProperties"
        raise SchemaError(path_of((*schemas[0][0], "properties")), reason)
    node = names_except(names) if others.names is None else others.names
    return {"patternProperties": {text_of(node, in_json=True): value}}


def _property_counts(schemas: Schemas, built: dict[str, Any], low: int, high: int) -> dict[str, int]:
    """The bounds that the other keywords do not imply."""
    num_required, num_named = len(built["required"]), len(built["properties"])
    is_open = "patternProperties" in built or built["additionalProperties"] is not False
    if not is_open and low > num_named:
        raise Unsatisfiable(f"an object with {num_named} properties cannot have {low}")
    if is_open and low > max(1, num_required):
        place = next(place for place, each in schemas if each.get("minProperties") == low)
        reason = "more than the required ones are supported only with additionalProperties: false"
        raise SchemaError(path_of((*place, "minProperties")), reason)
    counts = {"minProperties": low} if low > num_required else {}
    return counts | ({"maxProperties": high} if (is_open and high < MAX_COUNT) or high < num_named else {})
