"""`GrammarSpec`: what an answer must look like, as it travels in a request; and the parts to build one from.

Knows no tokenizer and no xgrammar. A format is a dict in the language of xgrammar's structural tags, and nests:

    text("to=f")          exactly this text, however it is cut into tokens
    token(7)              the token 7, which may be a control token
    free_tokens([1, 2])   any tokens but these, none included; ends where the next part begins
    json_schema(schema)   JSON that a schema describes; `json_object()` for any object
    regex(r"\\d+")        a text that matches as a whole
    ebnf("root ::= ...")  a text of a grammar in GBNF
    sequence(a, b, c)     one after the other
    one_of(a, b)          one of them
    repeated(a, 0, None)  so often, None for no limit

Any other format of the installed xgrammar may be used as it stands, for example `triggered_tags`.
"""

import json
from collections.abc import Iterable
from typing import Any

import msgspec

Format = dict[str, Any]


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer of a request, from its first token to the end of the turn.

    Where the format is complete, a stop token of the request may follow, and nothing else if the format cannot go on.
    A format may also end with a stop token of its own (`token`). Control tokens (the tokenizer's
    `special_tokens`) are matched by `token` and `free_tokens` alone, never by text: a JSON string cannot contain one.
    (The free part of `triggered_tags` and `dispatch` takes any bytes, so control tokens too; `free_tokens` and the
    formats `token_triggered_tags` and `token_dispatch` can exclude them.)
    """

    format_json: str  # a format as JSON; equal texts share one compiled grammar
    param: str  # the request field that asked for it, for messages

    @classmethod
    def of(cls, format_: Format, *, param: str) -> "GrammarSpec":
        """The specification of a format."""
        return cls(format_json=json.dumps(format_, ensure_ascii=False, separators=(",", ":")), param=param)


def text(value: str) -> Format:
    """Exactly this text."""
    return {"type": "const_string", "value": value}


def token(token_id: int) -> Format:
    """Exactly this token."""
    return {"type": "token", "token": token_id}


def free_tokens(excluded_ids: Iterable[int]) -> Format:
    """Any tokens, also none, but `excluded_ids`: usually every control token."""
    return {"type": "any_tokens", "exclude_tokens": sorted(excluded_ids)}


def json_schema(schema: bool | dict[str, Any], *, max_whitespace: int | None = None) -> Format:
    """JSON text of a schema. Between its parts stand at most `max_whitespace` characters in a row, None for any."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": max_whitespace}


def json_object(*, max_whitespace: int | None = None) -> Format:
    """JSON text of any object."""
    return json_schema({"type": "object", "additionalProperties": True}, max_whitespace=max_whitespace)


def regex(pattern: str) -> Format:
    """A text that the pattern matches from its first to its last character."""
    return {"type": "regex", "pattern": pattern}


def ebnf(grammar: str) -> Format:
    """A text of a grammar in GBNF (EBNF as in llama.cpp), whose first rule is `root`."""
    return {"type": "grammar", "grammar": grammar}


def sequence(*parts: Format) -> Format:
    """The parts, one after the other."""
    return {"type": "sequence", "elements": list(parts)}


def one_of(*parts: Format) -> Format:
    """One of the parts."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def repeated(part: Format, low: int, high: int | None) -> Format:
    """The part, at least `low` and at most `high` times; None for no limit.

    It is written out, so `high`, which is at least 1, should be small: xgrammar 0.2.9 has a format `repeat`, but it
    forgets what `free_tokens` in it exclude.
    """
    more: list[Format] = [{"type": "star", "content": part}] if high is None else []
    for _ in range(0 if high is None else high - low):
        more = [{"type": "optional", "content": sequence(part, *more)}]
    return sequence(*[part] * low, *more)
