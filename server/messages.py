"""Chat messages and tools, from wire models to the plain dictionaries that chat templates read. Renders nothing."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from loaders.markers import DeepSeek
from server.errors import BadRequest
from server.folding import reasoning_fields
from server.schema.chat import ChatMessage, Tool
from server.template_environment import JsonText

_ONE_SCHEMA = ("items", "contains", "not", "if", "then", "else")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def check_tool_results(messages: Sequence[ChatMessage]) -> None:
    """Every tool result must answer a call made before it."""
    known: set[str] = set()
    for index, message in enumerate(messages):
        known.update(call.id for call in message.tool_calls or ())
        if message.role == "tool" and message.tool_call_id not in known:
            param = f"messages[{index}].tool_call_id"
            raise BadRequest(f"{param}: no assistant message before it has a tool call with this id", param=param)


def plain_message(message: ChatMessage, *, thinks: bool) -> dict[str, Any]:
    """A message as templates expect it: absent keys stay absent, absent content becomes an empty text.

    `thinks`: the tokenizer has DeepSeek's think tokens, so reasoning may stand in the content.
    """
    content, thought = message.text or "", message.thought
    if thinks and message.role == "assistant" and DeepSeek.THINK_END in content:
        before, _, content = content.rpartition(DeepSeek.THINK_END)
        thought = thought or before.replace(DeepSeek.THINK, "").strip()
        content = content.lstrip("\n")
    if message.tool_calls and not content.strip():
        content = ""
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if thought:
        plain.update(reasoning_fields(thought))
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
        function["parameters"] = _without_boolean_schemas(tool.function.parameters)
    return {"type": "function", "function": function}


def _without_boolean_schemas(schema: Any) -> Any:
    """The same schema with `{}` for `true` and `{"not": {}}` for `false` where templates expect an object."""
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    if not isinstance(schema, Mapping):
        return schema
    plain = dict(schema)
    if isinstance(plain.get("properties"), Mapping):
        plain["properties"] = {name: _without_boolean_schemas(s) for name, s in plain["properties"].items()}
    for key in _ONE_SCHEMA:
        if key in plain:
            plain[key] = _without_boolean_schemas(plain[key])
    for key in _SCHEMA_LISTS:
        if isinstance(plain.get(key), list):
            plain[key] = [_without_boolean_schemas(s) for s in plain[key]]
    return plain


def _arguments(arguments: str | dict[str, Any]) -> JsonText:
    """The JSON text of a call's arguments; a string is taken as the model wrote it, valid or not."""
    return JsonText(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
