"""The Jinja environment of chat templates: sandboxed, with the functions, filters and tags that published ones use."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment


class JsonText(str):
    """Text that is JSON already: `|tojson` returns it unchanged, so it is never quoted twice."""

    __slots__ = ()


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Templates cannot reach Python objects or change what they are given."""

    intercepted_binops = frozenset({"+"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self.filters["tojson"] = _to_json
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`+`. A published template appends a schema's default, of any type, to text: other values become JSON."""
        if isinstance(left, str) and _is_json_value(right):
            right = _to_json(right)
        elif isinstance(right, str) and _is_json_value(left):
            left = _to_json(left)
        operation: Callable[[Any, Any], Any] = self.binop_table[operator]
        return operation(left, right)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _is_json_value(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | list | dict)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Like the `tojson` of chat templates: no HTML escapes, other scripts as they are."""
    if isinstance(value, JsonText):
        return value
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)
