"""Rewrites the JSON schemas of a format that bound a string's length, so that xgrammar counts characters.

For `minLength` and `maxLength` xgrammar 0.2.9 writes the rule `"\\"" characters{low, high} "\\""`, which it compiles in
milliseconds. But its class of characters allows control characters, which JSON does not. A pattern with the right class
takes a mask of the whole vocabulary for every position: 9 s for 200 characters and 200,000 tokens. So the schema
becomes the grammar that xgrammar writes for it, with the right class.
"""

import json
import re
from typing import Any

from engine.grammar_spec import Format

_KEYWORDS = ("minLength", "maxLength")
_CLASS = r"[^\"\\\r\n]"  # as xgrammar prints it; in a literal its quote would have more backslashes
_PLAIN_CHARACTERS = r"[^\0-\x1f\"\\\ud800-\udfff]"  # only a negated class is fast; surrogates are no characters
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)")


def count_characters(format_json: str) -> str:
    """The format with its schemas rewritten; the text as it is where no schema bounds a length.

    Raises:
        RuntimeError, ValueError: xgrammar refuses a schema, or the text is not JSON.
    """
    if not any(keyword in format_json for keyword in _KEYWORDS):
        return format_json
    return json.dumps(_rewritten(json.loads(format_json)))


def _rewritten(part: Any) -> Any:
    if isinstance(part, list):
        return [_rewritten(each) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema" and part.keys() <= {"type", "json_schema", "max_whitespace_cnt"}:
        return _grammar_of(part) if _bounds_a_length(part["json_schema"]) else part
    return {key: _rewritten(each) for key, each in part.items()}


def _bounds_a_length(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_bounds_a_length, schema))
    if not isinstance(schema, dict):
        return False
    return any(keyword in schema for keyword in _KEYWORDS) or any(map(_bounds_a_length, schema.values()))


def _grammar_of(part: dict[str, Any]) -> Format:
    import xgrammar

    schema, max_whitespace = json.dumps(part["json_schema"]), part.get("max_whitespace_cnt")
    written = str(xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=max_whitespace))
    return {"type": "grammar", "grammar": _ESCAPE.sub(_fixed_width, written.replace(_CLASS, _PLAIN_CHARACTERS))}


def _fixed_width(escape: re.Match[str]) -> str:
    r"""`\u00df` for `\xdf`, which xgrammar would read on as `\xdfe` where an e follows, as C does."""
    return rf"\u00{escape[1]}" if escape[1] else escape[0]
