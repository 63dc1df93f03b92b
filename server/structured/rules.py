"""`turn_rules`: from an answer's format, the tools and the choice among them to what a turn may consist of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from engine.grammar_spec import Format
from server.errors import BadRequest
from server.structured.answers import any_object, arguments
from server.structured.turn import CallRule, TurnRules


class OfferedTool(NamedTuple):
    """A function of a request. `param` is the field of its schema."""

    name: str
    parameters: dict[str, Any] | None
    is_strict: bool
    param: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CallChoice:
    """Whether the model may, must or must not call, and which functions; `names` None: all that are offered."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: frozenset[str] | None = None
    is_parallel: bool = True
    param: str = "tool_choice"


class AnswerFormat(NamedTuple):
    """What the text of an answer must be, and the request field that says so."""

    format: Format
    param: str


def turn_rules(answer: AnswerFormat | None, tools: Sequence[OfferedTool], choice: CallChoice) -> TurnRules | None:
    """The rules for a turn; None if it is free.

    With `auto`, tools that are not strict and no format, models call as they were trained to, unbound. Arguments follow
    the schema of a strict tool, and that of any tool if a call must come; else they are any object.

    Raises:
        BadRequest: the choice names no tool or an unknown one, or a schema cannot be honoured.
    """
    known = {tool.name for tool in tools}
    for name in sorted(choice.names or ()):
        if name not in known:
            raise BadRequest(f"{choice.param}: no tool is named '{name[:64]}'", param=choice.param)
    allowed = [tool for tool in tools if choice.names is None or tool.name in choice.names]
    if choice.mode == "required" and not allowed:
        raise BadRequest(f"{choice.param}: a call is asked for, and there are no tools", param=choice.param)
    callable_tools = [] if choice.mode == "none" else allowed
    is_bound = (
        answer is not None
        or choice.mode == "required"
        or choice.names is not None
        or any(tool.is_strict for tool in callable_tools)
        or (choice.mode == "none" and bool(tools))
    )
    if not is_bound:
        return None
    calls = tuple(
        CallRule(tool.name, _arguments_of(tool, must_call=choice.mode == "required")) for tool in callable_tools
    )
    return TurnRules(
        answer=None if answer is None else answer.format,
        calls=calls,
        must_call=choice.mode == "required",
        is_parallel=choice.is_parallel,
        param=answer.param if answer is not None else "tools" if choice.mode == "auto" else choice.param,
    )


def _arguments_of(tool: OfferedTool, *, must_call: bool) -> Format:
    """What a call's arguments must be. Without `strict`, a schema that cannot be honoured means any object."""
    if tool.is_strict:
        return arguments(tool.parameters, tool.param)
    try:
        return arguments(tool.parameters, tool.param) if must_call else any_object()
    except BadRequest:
        return any_object()
