"""Formats of an answer's text: JSON of a schema, an expression, a choice, a grammar, a structural tag.

Every function takes `param`, the request field that it checks, and raises BadRequest naming the part that is wrong.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from engine.grammar_spec import Format, ebnf, json_object, json_schema, one_of, regex, text
from server.errors import BadRequest
from server.schema.limits import MAX_NESTING, is_too_deep
from server.structured.document import MAX_DEPTH, path_of
from server.structured.errors import PatternError, SchemaError, Unsatisfiable
from server.structured.json_schema import prepare_arguments, prepare_schema
from server.structured.pattern import parse
from server.structured.pattern_text import text_of
from server.structured.turn import MAX_WHITESPACE


def any_object() -> Format:
    """JSON text of any object."""
    return json_object(max_whitespace=MAX_WHITESPACE)


def schema_answer(schema: Any, param: str) -> Format:
    """JSON text of a schema."""
    try:
        return json_schema(prepare_schema(schema), max_whitespace=MAX_WHITESPACE)
    except SchemaError as error:
        raise _refused(param, error) from None


def arguments(schema: dict[str, Any] | None, param: str) -> Format:
    """A function's arguments: JSON text of an object of a schema, of any object without one."""
    try:
        return json_schema(prepare_arguments(schema), max_whitespace=MAX_WHITESPACE)
    except SchemaError as error:
        raise _refused(param, error) from None


def json_text(value: Any, param: str) -> Any:
    """A JSON value that may be sent as text, which is read as strictly as the body: infinity is no number there."""
    if not isinstance(value, str):
        return value
    try:
        content = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"{param}: it is not valid JSON: {error}", param=param) from None
    if is_too_deep(content):
        raise BadRequest(f"{param}: lists and objects are nested more than {MAX_NESTING} deep", param=param)
    return content


def regex_answer(pattern: str, param: str) -> Format:
    """Text that an expression matches from its first to its last character."""
    try:
        return regex(text_of(parse(pattern, is_search=False), in_json=False))
    except (PatternError, Unsatisfiable) as error:
        raise BadRequest(f"{param}: {error}", param=param) from None


def choice_answer(choices: Sequence[str], param: str) -> Format:
    """One of several texts."""
    if not all(choices):
        raise BadRequest(f"{param}: an empty text cannot be chosen", param=param)
    return one_of(*map(text, dict.fromkeys(choices)))


def grammar_answer(grammar: str) -> Format:
    """Text of a grammar in GBNF. The engine reports its mistakes."""
    return ebnf(grammar)


def tag_answer(tag: Any, param: str) -> Format:
    """A structural tag: a format of xgrammar's, wrapped or not. Schemas and expressions in it are checked as usual."""
    if not isinstance(tag, dict):
        raise BadRequest(f"{param}: it must be an object", param=param)
    if "structures" in tag:
        return legacy_tag_answer(tag["structures"], tag.get("triggers"), param)
    wrapped = tag.get("type") == "structural_tag" and "format" in tag
    prepared: Format = _prepared(tag["format"], f"{param}.format", 0) if wrapped else _prepared(tag, param, 0)
    return prepared


def legacy_tag_answer(structures: Any, triggers: Any, param: str) -> Format:
    """Text with tagged JSON in it, in vLLM's older spelling: `begin`, `schema` and `end` of each tag."""
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
        raise BadRequest(f"{param}: structures and triggers must be lists that are not empty", param=param)
    tags = []
    for index, each in enumerate(structures):
        where = f"{param}.structures[{index}]"
        if not isinstance(each, dict) or not all(isinstance(each.get(key), str) for key in ("begin", "end")):
            raise BadRequest(f"{where}: it must have begin and end as strings, and a schema", param=where)
        content = schema_answer(json_text(each.get("schema", {}), f"{where}.schema"), f"{where}.schema")
        tags.append({"type": "tag", "begin": each["begin"], "content": content, "end": each["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _prepared(part: Any, where: str, depth: int) -> Any:
    """A copy of a format in which every schema and expression is in the compiler's terms."""
    if depth > MAX_DEPTH:
        raise BadRequest(f"{where}: it is nested too deeply", param=where[:200])
    if isinstance(part, list):
        return [_prepared(each, f"{where}[{index}]", depth + 1) for index, each in enumerate(part)]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema" and part.get("style", "json") == "json":
        return schema_answer(part.get("json_schema"), f"{where}.json_schema")
    if part.get("type") == "regex":
        return regex_answer(str(part.get("pattern")), f"{where}.pattern")
    return {key: _prepared(each, f"{where}.{path_of([key])}", depth + 1) for key, each in part.items()}


def _refused(param: str, error: SchemaError) -> BadRequest:
    where = f"{param}.{error.path}" if error.path and not error.path.startswith("[") else f"{param}{error.path}"
    return BadRequest(f"{where}: {error.reason}", param=where)
