"""Chat messages and tools, from wire models to the plain dictionaries that chat templates read. Renders nothing."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from server.errors import BadRequest
from server.prompt import JsonText
from server.schema.chat import ChatMessage, Tool


def check_tool_results(messages: Sequence[ChatMessage]) -> None:
    """Every tool result must answer a call made before it."""
    known: set[str] = set()
    for index, message in enumerate(messages):
        known.update(call.id for call in message.tool_calls or ())
        if message.role == "tool" and message.tool_call_id not in known:
            param = f"messages[{index}].tool_call_id"
            raise BadRequest(f"{param}: no assistant message before it has a tool call with this id", param=param)


def plain_message(message: ChatMessage, *, thinks: bool) -> dict[str, Any]:
    """A message as templates expect it: absent keys are absent. `thinks`: the tokenizer has DeepSeek's think tokens.

    Next to tool calls, DeepSeek's templates want missing content as None, and GPT-OSS's as an empty string.
    """
    content, thought = message.content, message.thought
    if thinks and message.role == "assistant" and content and "</think>" in content:
        before, _, content = content.rpartition("</think>")
        thought = thought or before.replace("<think>", "").strip()
        content = content.lstrip("\n")
    plain: dict[str, Any] = {"role": message.role, "content": content if thinks else content or ""}
    if message.name is not None:
        plain["name"] = message.name
    if thought:
        plain.update(reasoning=thought, reasoning_content=thought, thinking=thought)
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def plain_tool(tool: Tool) -> dict[str, Any]:
    """A tool as templates expect it."""
    function: dict[str, Any] = {"name": tool.function.name, "description": tool.function.description or ""}
    if tool.function.parameters is not None:
        function["parameters"] = tool.function.parameters
    return {"type": "function", "function": function}


def _arguments(arguments: str | dict[str, Any]) -> JsonText:
    """The JSON text of a call's arguments; a string is taken as the model wrote it, valid or not."""
    return JsonText(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def with_preamble_as_thought(message: Mapping[str, Any]) -> dict[str, Any]:
    """Some templates take either content or reasoning next to tool calls; the preamble then joins the reasoning."""
    if not (message.get("tool_calls") and message.get("content") and message.get("thinking")):
        return dict(message)
    thought = f"{message['thinking']}\n{message['content']}"
    return {**message, "content": "", "reasoning": thought, "reasoning_content": thought, "thinking": thought}
