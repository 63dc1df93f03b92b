"""`chat_request`: what /v1/messages asks for, as a chat request. Errors of chat's fields get the names of ours."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from server.body import checked
from server.field_names import renamed_fields
from server.schema.anthropic import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    ContentBlock,
    CountTokensRequest,
    MessagesRequest,
)
from server.schema.chat import ChatCompletionRequest

_EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts that no model's template knows, and the highest that all know."""

_OUR_NAMES = (
    (re.compile(r"messages\[\d+\](?:\.\w+)*"), "messages"),  # one message of ours may be several of chat's
    (re.compile(r"(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"response_format(?:\.json_schema)?"), "output_config.format"),
    (re.compile(r"reasoning_effort"), "output_config.effort"),
    (re.compile(r"thinking_token_budget"), "thinking"),
    (re.compile(r"max_(?:completion_)?tokens"), "max_tokens"),
    (re.compile(r"continue_final_message"), "messages"),
    (re.compile(r"parallel_tool_calls"), "tool_choice.disable_parallel_tool_use"),
    (re.compile(r"^stop"), "stop_sequences"),
)


def our_names() -> AbstractContextManager[None]:
    """Errors raised inside name the fields of Anthropic's API instead of chat's."""
    return renamed_fields(_OUR_NAMES)


def chat_request(wire: CountTokensRequest) -> ChatCompletionRequest:
    """The chat request. Raises BadRequest that names the field of `wire`."""
    messages = [message for turn in wire.messages for message in _messages_of(turn)]
    if wire.system is not None:
        messages.insert(0, {"role": "system", "content": wire.system})
    choice, config = wire.tool_choice, wire.output_config
    fields: dict[str, Any] = {
        "messages": messages,
        "tools": [_tool(tool) for tool in wire.tools or ()],
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "continue_final_message": wire.messages[-1].role == "assistant",
        "reasoning_effort": _EFFORTS.get(config.effort, config.effort) if config and config.effort else None,
        "response_format": _response_format(config.format.schema_) if config and config.format else None,
    }
    if wire.thinking is not None and wire.thinking.type != "adaptive":
        fields["thinking_token_budget"] = wire.thinking.budget_tokens or 0
    if isinstance(wire, MessagesRequest):
        fields |= {
            "max_completion_tokens": wire.max_tokens,
            "stop": wire.stop_sequences,
            **{name: getattr(wire, name) for name in ("temperature", "top_p", "top_k")},
        }
    with our_names():
        return checked(ChatCompletionRequest, fields)


def _messages_of(turn: AnthropicMessage) -> Iterator[dict[str, Any]]:
    """Chat messages of a turn: one of the assistant; of the user, one for each result, and the text between them."""
    if turn.role == "assistant":
        yield _assistant_message(turn.content)
        return
    texts: list[str] = []
    for block in turn.content:
        if block.type == "text":
            texts.append(block.text or "")
            continue
        if texts:
            yield {"role": turn.role, "content": "\n".join(texts)}
            texts = []
        # No template knows failures, so the words have to say it.
        failure = "Error: " if block.is_error else ""
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": failure + (block.content or "")}
    if texts or not turn.content:
        yield {"role": turn.role, "content": "\n".join(texts)}


def _assistant_message(blocks: list[ContentBlock]) -> dict[str, Any]:
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    texts = [block.text or "" for block in blocks if block.type == "text"]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if block.type == "tool_use"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


def _tool_choice(choice: AnthropicToolChoice) -> Any:
    """Chat's word for it; chat decides what it supports."""
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
