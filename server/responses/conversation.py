"""`chat_request`: what /v1/responses asks for, as a chat request. Errors of chat's fields get the names of ours."""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from server.body import checked
from server.errors import BadRequest
from server.field_names import renamed_fields
from server.schema.chat import ChatCompletionRequest
from server.schema.responses import FunctionTool, InputItem, ResponsesRequest, TextFormat

_SAME_NAME = ("temperature", "top_p", "top_k", "min_p", "seed", "parallel_tool_calls", "top_logprobs")
_OUR_NAMES = (  # patterns of chat's field names
    (re.compile(r"messages(?:\[\d+\])?(?:\.\w+)*"), "input"),
    (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"tool_choice\.allowed_tools"), "tool_choice"),
    (re.compile(r"(tool_choice(?:\.tools\[\d+\])?)\.function"), r"\1"),
    (re.compile(r"response_format(?:\.json_schema)?"), "text.format"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"max_(?:completion_)?tokens"), "max_output_tokens"),
)


def chat_request(wire: ResponsesRequest, history: Sequence[InputItem]) -> ChatCompletionRequest:
    """The chat request of an answer that follows `history`, the items of earlier turns.

    Raises:
        BadRequest: names the field of `wire`.
    """
    messages = messages_of(history, wire.input)
    if wire.instructions is not None:
        messages.insert(0, {"role": "system", "content": wire.instructions})
    fields: dict[str, Any] = {name: getattr(wire, name) for name in _SAME_NAME}
    fields |= {
        "messages": messages,
        "max_completion_tokens": wire.max_output_tokens,
        "logprobs": wire.has_logprobs,
        "tools": [chat_tool(tool) for tool in wire.tools or ()],
        "tool_choice": chat_tool_choice(wire.tool_choice),
        "response_format": chat_format(wire.text.format) if wire.text and wire.text.format else None,
        "reasoning_effort": wire.reasoning.effort if wire.reasoning else None,
    }
    with our_names():
        return checked(ChatCompletionRequest, fields)


def our_names() -> AbstractContextManager[None]:
    """Errors raised inside name the fields of a Responses request instead of chat's."""
    return renamed_fields(_OUR_NAMES)


def chat_tool(tool: FunctionTool) -> dict[str, Any]:
    """The chat form of a function, whose fields stand one level deeper there."""
    function = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": function}


_OF_TOOLS = ("description", "parameters", "strict")  # of a tool that is named by its whole definition


def chat_tool_choice(choice: Any) -> Any:
    """The chat form of `tool_choice`: functions are named one level deeper there. Chat decides what it supports."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind not in ("function", "allowed_tools") or kind in choice:
        return choice
    fields = {name: value for name, value in choice.items() if name != "type" and name not in _OF_TOOLS}
    if isinstance(fields.get("tools"), list):
        fields["tools"] = [chat_tool_choice(tool) for tool in fields["tools"]]
    return {"type": kind, kind: fields}


def chat_format(text_format: TextFormat) -> dict[str, Any]:
    """The chat form of `text.format`."""
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    fields = text_format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": fields}


@dataclass(slots=True)
class _Turn:
    """What the assistant said and did between two items of others."""

    reasoning: list[str]
    content: list[str]
    calls: list[dict[str, Any]]

    def message(self) -> dict[str, Any]:
        """The chat message of it."""
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(self.content)}
        if self.reasoning:
            message["reasoning"] = "\n".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def messages_of(history: Sequence[InputItem], items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Chat messages of a conversation. Reasoning, text and calls that follow each other are one assistant message.

    Raises:
        BadRequest: a result answers no call before it.
    """
    messages: list[dict[str, Any]] = []
    known_calls: set[str | None] = set()
    numbered = enumerate([*history, *items], -len(history))
    for is_own, run in groupby(numbered, key=lambda each: _is_own(each[1])):
        if is_own:
            own = [item for _, item in run]
            known_calls.update(item.call_id for item in own)
            messages += _own_messages(own)
            continue
        for index, item in run:
            if item.type != "function_call_output":
                messages.append({"role": item.role, "content": item.content})
            elif item.call_id in known_calls:
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            else:
                param = f"input[{index}].call_id"
                raise BadRequest(f"{param}: no function_call before it has this call_id", param=param)
    return messages


def _is_own(item: InputItem) -> bool:
    return item.type in ("reasoning", "function_call") or item.role == "assistant"


def _own_messages(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """The assistant's messages between two items of others. Text ends a message, except beside calls.

    With a message of its own, text before a call would be an answer, after which templates drop earlier reasoning.
    """
    has_calls = any(item.type == "function_call" for item in items)
    turns = [_Turn([], [], [])]
    for item in items:
        if turns[-1].content and not has_calls:
            turns.append(_Turn([], [], []))
        _add(turns[-1], item)
    return [turn.message() for turn in turns]


def _add(turn: _Turn, item: InputItem) -> None:
    if item.type == "function_call":
        function = {"name": item.name, "arguments": item.arguments}
        turn.calls.append({"id": item.call_id, "type": "function", "function": function})
    elif item.type == "message":
        turn.content.append(item.content or "")
    elif item.thought:
        turn.reasoning.append(item.thought)
