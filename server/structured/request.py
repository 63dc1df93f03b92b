"""Reads the fields of chat and completions requests: the format of the answer, the tools, the choice among them."""

from collections.abc import Sequence

from server.schema.chat import ChatCompletionRequest, Tool
from server.schema.structured import AllowedTools, FormattedRequest, NamedTool, ResponseFormat, StructuredOutputs
from server.structured.answers import (
    any_object,
    choice_answer,
    grammar_answer,
    json_text,
    legacy_tag_answer,
    regex_answer,
    schema_answer,
    tag_answer,
)
from server.structured.rules import AnswerFormat, CallChoice, OfferedTool


def answer_format(wire: FormattedRequest) -> AnswerFormat | None:
    """What `response_format` or `structured_outputs` asks for; None for any text. Raises BadRequest naming the part."""
    if wire.structured_outputs is not None:
        return _of_structured_outputs(wire.structured_outputs)
    if wire.response_format is None or wire.response_format.type == "text":
        return None
    return _of_response_format(wire.response_format)


def _of_response_format(wanted: ResponseFormat) -> AnswerFormat:
    param = "response_format"
    if wanted.type == "structural_tag" and wanted.format is not None:
        return AnswerFormat(tag_answer(wanted.format, f"{param}.format"), f"{param}.format")
    if wanted.type == "structural_tag":
        return AnswerFormat(legacy_tag_answer(wanted.structures, wanted.triggers, param), param)
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        return AnswerFormat(any_object(), param)
    param = f"{param}.json_schema.schema"
    return AnswerFormat(schema_answer(wanted.json_schema.schema_, param), param)


def _of_structured_outputs(wanted: StructuredOutputs) -> AnswerFormat:
    param = "structured_outputs"
    if wanted.json_ is not None:
        param = f"{param}.json"
        return AnswerFormat(schema_answer(json_text(wanted.json_, param), param), param)
    if wanted.regex is not None:
        param = f"{param}.regex"
        return AnswerFormat(regex_answer(wanted.regex, param), param)
    if wanted.choice is not None:
        param = f"{param}.choice"
        return AnswerFormat(choice_answer(wanted.choice, param), param)
    if wanted.grammar is not None:
        return AnswerFormat(grammar_answer(wanted.grammar), f"{param}.grammar")
    if wanted.structural_tag is not None:
        param = f"{param}.structural_tag"
        return AnswerFormat(tag_answer(json_text(wanted.structural_tag, param), param), param)
    return AnswerFormat(any_object(), f"{param}.json_object")


def offered_tools(tools: Sequence[Tool]) -> list[OfferedTool]:
    """The tools of a chat request."""
    return [
        OfferedTool(
            name=tool.function.name,
            parameters=tool.function.parameters,
            is_strict=bool(tool.function.strict),
            param=f"tools[{index}].function.parameters",
        )
        for index, tool in enumerate(tools)
    ]


def call_choice(wire: ChatCompletionRequest) -> CallChoice:
    """What a chat request says about calls."""
    choice, is_parallel = wire.tool_choice, wire.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        return CallChoice(mode="required", names=frozenset([choice.function.name]), is_parallel=is_parallel)
    if isinstance(choice, AllowedTools):
        names = frozenset(tool.function.name for tool in choice.allowed_tools.tools)
        return CallChoice(mode=choice.allowed_tools.mode, names=names, is_parallel=is_parallel)
    return CallChoice(mode=choice or "auto", is_parallel=is_parallel)
