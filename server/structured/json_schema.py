"""`prepare_schema`: a client's JSON Schema in the terms that the grammar compiler honours exactly.

The compiler ignores some keywords, and combinations of others, without a word. So the schema is rewritten: references
with siblings, `allOf`, and keywords beside `anyOf` are merged; patterns, formats and lengths become one expression;
`oneOf` becomes `anyOf` if its branches exclude each other. What cannot be rewritten is refused with its place. Answers
satisfy the client's schema, but not every value that does can be the answer: docs/api.md lists the differences.
A part that only values without an end satisfy counts as one that allows no value.
"""

import json
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import combinations, count
from typing import Any, NamedTuple

from server.structured.containers import array, object_
from server.structured.disjoint import are_disjoint, canonical, type_of
from server.structured.document import MAX_DEPTH, MAX_PARTS, TYPES_OF_KEYWORD, Document, Part, path_of
from server.structured.errors import SchemaError, Unsatisfiable
from server.structured.finite import DEFINITIONS, finite_definitions
from server.structured.scalars import Schemas, number, string

MAX_SCHEMA_CHARS = 200_000
_MAX_CACHED_CHARS = 20_000
_MAX_EXACT = 2**53
_ANY_OBJECT = {"type": "object", "additionalProperties": {}}


def prepare_schema(schema: Any) -> dict[str, Any]:
    """The schema for the compiler.

    Raises:
        SchemaError: it is wrong, asks for something that is not supported, is too large, or allows no value.
    """
    try:
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA_CHARS:
            raise SchemaError("", f"the schema has {len(text)} characters: at most {MAX_SCHEMA_CHARS} are accepted")
        return _rewritten(text) if len(text) <= _MAX_CACHED_CHARS else _rewrite(schema)
    except Unsatisfiable as error:
        raise SchemaError("", f"no value satisfies the schema: {error}") from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, SchemaError):
            raise
        raise SchemaError("", "the schema is nested too deeply") from None


@lru_cache(maxsize=256)
def _rewritten(text: str) -> dict[str, Any]:
    """The schema of a JSON text. Nobody changes it afterwards. Clients send the same schemas again and again."""
    return _rewrite(json.loads(text))


def _rewrite(schema: Any) -> dict[str, Any]:
    endless: set[_Definition] = set()
    bound: set[frozenset[Part]] = set()
    while True:  # once, or again if something is endless or bound to where it stands
        rewriter = _Rewriter(schema, endless, bound)
        try:
            built = rewriter.rewrite()
        except Unsatisfiable:
            if rewriter.found_bound <= bound:
                raise
            built = {}
        if not rewriter.found_bound <= bound:
            bound |= rewriter.found_bound
        elif found := rewriter.endless():
            endless |= found
        else:
            return built


def prepare_arguments(schema: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object; without a schema any object.

    Raises:
        SchemaError: as `prepare_schema`, or arguments that cannot be an object.
    """
    if not schema:
        return _ANY_OBJECT
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise SchemaError("type", "a function's arguments are an object")
    return prepare_schema({**schema, "type": "object"})


class _Definition(NamedTuple):
    """What holds for a value: the parts, `within` definitions begun for the same value."""

    parts: frozenset[Part]
    within: frozenset[frozenset[Part]] = frozenset()


class _Rewriter:
    """Rewrites one schema. What references lead to becomes definitions, so that it may refer to itself.

    A definition that is met again for the same value adds nothing there, so it is left out. What stands inside it may
    then allow less than elsewhere, and has a definition of its own.

    `endless`: definitions that no value with an end satisfies, as an earlier rewriting has found.
    `bound`: parts of definitions that allow less inside another one, found likewise; `found_bound` has those found now.
    """

    def __init__(
        self, root: Any, endless: Collection[_Definition] = (), bound: Collection[frozenset[Part]] = ()
    ) -> None:
        self._document = Document(root)
        self._endless = endless
        self._bound = bound
        self.found_bound: set[frozenset[Part]] = set()
        self._names: dict[_Definition, str] = {}
        self._definitions: dict[str, dict[str, Any]] = {}
        self._open: frozenset[frozenset[Part]] = frozenset()  # definitions begun for the value at hand
        self._left_out: set[frozenset[Part]] = set()  # of them, so far, in the last one
        self._left_out_of: dict[_Definition, frozenset[frozenset[Part]]] = {}
        self._numbers = count()
        self._num_parts = 0
        self._depth = 0

    def rewrite(self) -> dict[str, Any]:
        built = self._build([Part(())])
        return {**built, "$defs": self._definitions} if self._definitions else built

    def endless(self) -> set[_Definition]:
        """Definitions that no value with an end satisfies."""
        finite = finite_definitions(self._definitions)
        return {each for each, name in self._names.items() if name not in finite}

    def _build(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The schema for a value for which all the parts hold."""
        self._num_parts += 1
        place = path_of(parts[0].place) if parts else ""
        if self._num_parts > MAX_PARTS:
            raise SchemaError(place, f"written out, the schema has more than {MAX_PARTS} parts")
        if self._depth > MAX_DEPTH:
            raise SchemaError(place, f"it is nested more than {MAX_DEPTH} deep")
        self._depth += 1
        try:
            expanded, followed = self._document.expand(parts)
            return self._definition(expanded, place) if followed else self._merged(expanded)
        finally:
            self._depth -= 1

    def _build_inner(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The schema for a value inside the one at hand."""
        outer, self._open = self._open, frozenset()
        try:
            return self._build(parts)
        finally:
            self._open = outer

    def _definition(self, parts: Sequence[Part], place: str) -> dict[str, Any]:
        """A reference to the definition of what holds for a value at the `place`, where a reference stands."""
        key = frozenset(parts)
        if key in self._open:
            self._left_out.add(key)
            raise Unsatisfiable("a schema that refers to itself for the same value adds none")
        known_as = _Definition(key), _Definition(key, self._open if key in self._bound else frozenset())
        for each in known_as:
            if each in self._endless:
                self._left_out |= each.within
                place = place or "the root"
                raise Unsatisfiable(f"at {place}, each value needs another like it inside, without an end")
            if each in self._names:
                self._left_out |= self._open & self._left_out_of[each]
                return {"$ref": f"{DEFINITIONS}{self._names[each]}"}
        return {"$ref": f"{DEFINITIONS}{self._define(known_as[1], parts)}"}

    def _define(self, definition: _Definition, parts: Sequence[Part]) -> str:
        """The name of a new definition. One that leaves out nothing of those it stands in serves elsewhere too."""
        name = self._names[definition] = f"part{next(self._numbers)}"
        self._left_out_of[definition] = frozenset()
        outer, self._left_out = self._left_out, set()
        outer_open, self._open = self._open, self._open | {definition.parts}
        try:
            self._definitions[name] = self._merged(parts)
        except Unsatisfiable:
            while (last := self._names.popitem())[0] != definition:  # begun inside, and may refer to this one
                self._definitions.pop(last[1], None)
            raise
        finally:
            self._open = outer_open
            self._left_out.discard(definition.parts)
            left_out = frozenset(self._left_out)
            self._left_out |= outer
        self._left_out_of[definition] = left_out
        if left_out:
            self.found_bound.add(definition.parts)
        else:
            self._names[_Definition(definition.parts)] = name
            self._left_out_of[_Definition(definition.parts)] = left_out
        return name

    def _merged(self, parts: Sequence[Part]) -> dict[str, Any]:
        for part in parts:
            for keyword in ("anyOf", "oneOf"):
                if keyword in self._document.at(part):
                    return self._distributed(part, keyword, parts)
        schemas = [(part.place, self._document.at(part)) for part in parts]
        if any("enum" in each or "const" in each for _, each in schemas):
            return {"enum": _values(schemas)}
        types = _types(schemas)
        if types is None:
            return {}
        options: list[dict[str, Any]] = []
        reason: Unsatisfiable | None = None
        for name in types:
            try:
                options.append(self._typed(name, schemas))
            except Unsatisfiable as error:
                reason = error
        if not options:
            raise reason or Unsatisfiable("no type is allowed")
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _typed(self, name: str, schemas: Schemas) -> dict[str, Any]:
        if name in ("integer", "number"):
            return number(schemas, is_integer=name == "integer")
        if name == "string":
            return string(schemas)
        if name == "array":
            return array(schemas, self._build_inner)
        return object_(schemas, self._build_inner) if name == "object" else {"type": name}

    def _distributed(self, part: Part, keyword: str, parts: Sequence[Part]) -> dict[str, Any]:
        """One schema for each branch, merged with all else that holds."""
        branches = [Part((*part.place, keyword, index)) for index in range(len(self._document.at(part)[keyword]))]
        if keyword == "oneOf":
            for left, right in combinations(branches, 2):
                if not are_disjoint(self._document, left, right):
                    raise SchemaError(
                        path_of((*part.place, "oneOf")),
                        f"branches {left.place[-1]} and {right.place[-1]} may both hold for a value: use anyOf, or "
                        "give both a required property with different constants",
                    )
        # What they refer to and their `allOf` are among the parts already.
        followed = [Part(each.place, each.done | {"$ref", "allOf"}) for each in parts if each != part]
        rest = [Part(part.place, part.done | {"$ref", "allOf", keyword}), *followed]
        options: list[dict[str, Any]] = []
        reason: Unsatisfiable | None = None
        for branch in branches:
            try:
                built = self._build([branch, *rest])
            except Unsatisfiable as error:
                reason = error
            else:
                options.append(built)
        if not options:
            raise reason or Unsatisfiable("no branch allows a value")
        return options[0] if len(options) == 1 else {"anyOf": options}


def _types(schemas: Schemas) -> list[str] | None:
    """Types that all parts allow; None if they say nothing. Without `type`, those that other keywords are about."""
    allowed: list[str] | None = None
    for _, each in schemas:
        if "type" not in each:
            continue
        names = [each["type"]] if isinstance(each["type"], str) else each["type"]
        both = names if allowed is None else [_narrower(a, b) for a in allowed for b in names if _narrower(a, b)]
        allowed = list(dict.fromkeys(both))
    if allowed is not None:
        return [name for name in allowed if not (name == "integer" and "number" in allowed)]
    return list(dict.fromkeys(TYPES_OF_KEYWORD[key] for _, each in schemas for key in each)) or None


def _narrower(left: str, right: str) -> str:
    """The type of values that have both types; empty if there are none."""
    if left == right or {left, right} == {"integer", "number"}:
        return left if left == right else "integer"
    return ""


def _values(schemas: Schemas) -> list[Any]:
    """Values that every `enum`, `const` and `type` allows. Raises SchemaError for other keywords about such values."""
    values: list[Any] | None = None
    types = _types([(place, {key: each[key] for key in each if key == "type"}) for place, each in schemas])
    for _, each in schemas:
        for listed in ([each["const"]] if "const" in each else None, each.get("enum")):
            if listed is not None:
                known = {canonical(value) for value in listed}
                values = listed if values is None else [value for value in values if canonical(value) in known]
    kept = [value for value in values or () if types is None or _has_type(value, types)]
    if not kept:
        raise Unsatisfiable("no value of enum or const has the type")
    kept_types = {type_of(value) for value in kept}
    for place, each in schemas:
        for keyword in each:
            if TYPES_OF_KEYWORD.get(keyword) in kept_types:
                raise SchemaError(path_of((*place, keyword)), "beside enum or const it is not supported")
    for value in kept:
        _check_exact(value, path_of(schemas[0][0]))
    return kept


def _has_type(value: Any, types: list[str]) -> bool:
    name = type_of(value)
    return name in types or (name == "number" and "integer" in types and value == int(value))


def _check_exact(value: Any, place: str) -> None:
    """Refuse numbers that the compiler would round."""
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            _check_exact(each, place)
    elif isinstance(value, int) and not -_MAX_EXACT <= value <= _MAX_EXACT:
        raise SchemaError(place, "integers beyond 2^53 are not supported in enum and const")
