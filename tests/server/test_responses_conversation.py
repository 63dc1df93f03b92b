"""Items to chat messages: one assistant message a turn; formats and choices of tools in chat's spelling."""

import pytest

from server.errors import BadRequest
from server.responses.conversation import chat_format, chat_request, chat_tool_choice, messages_of, our_names
from server.schema.responses import InputItem, ResponsesRequest, TextFormat
from tests.tables import rows

USER = {"role": "user", "content": "Hi"}
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
TEXT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "R"}]}
TOOL_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def messages(*items, history=0):
    parsed = [InputItem.model_validate(item) for item in items]
    return messages_of(parsed[:history], parsed[history:])


@rows(
    "items, expected",
    ([USER], [USER]),
    ([USER, REASONING, TEXT], [USER, {"role": "assistant", "content": "A", "reasoning": "Hm."}]),
    ([TEXT, TEXT], [{"role": "assistant", "content": "A"}] * 2),
    ([REASONING, TEXT] * 2, [{"role": "assistant", "content": "A", "reasoning": "Hm."}] * 2),
    ([REASONING], [{"role": "assistant", "content": "", "reasoning": "Hm."}]),
    (
        [REASONING, TEXT, REASONING, CALL, CALL | {"call_id": "d"}, TEXT, RESULT],
        [
            {
                "role": "assistant",
                "content": "A\nA",
                "reasoning": "Hm.\nHm.",
                "tool_calls": [TOOL_CALL, TOOL_CALL | {"id": "d"}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "R"},
        ],
    ),
    (
        [TEXT, CALL, RESULT],
        [
            {"role": "assistant", "content": "A", "tool_calls": [TOOL_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "R"},
        ],
    ),
    ([{**REASONING, "content": None, "summary": [{"type": "summary_text", "text": "S"}]}, USER],
     [{"role": "assistant", "content": "", "reasoning": "S"}, USER]),
)  # fmt: skip
def test_items_of_one_turn_are_one_message(items, expected):
    for history in range(len(items)):
        assert messages(*items, history=history) == expected


def test_a_result_needs_its_call_and_the_refusal_counts_items_of_the_request():
    with pytest.raises(BadRequest) as refused:
        messages(USER, CALL, USER, RESULT | {"call_id": "x"}, history=2)
    assert refused.value.param == "input[1].call_id"


@rows(
    "choice, expected",
    (None, None),
    ("auto", "auto"),
    ("required", "required"),
    ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    (
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
        },
    ),
    (
        {"type": "function", "name": "f", "description": "d", "parameters": {}, "strict": True},  # the tool itself
        {"type": "function", "function": {"name": "f"}},
    ),
    ({"type": "web_search"}, {"type": "web_search"}),
)
def test_a_choice_of_tools_in_chats_spelling(choice, expected):
    assert chat_tool_choice(choice) == expected


@rows(
    "given, expected",
    ({"type": "json_object"}, {"type": "json_object"}),
    (
        {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}},
    ),
)
def test_a_format_in_chats_spelling(given, expected):
    assert chat_format(TextFormat.model_validate(given)) == expected


@rows(
    "chats, ours",
    ("messages[3].content", "input"),
    ("tools[2].function.parameters.x", "tools[2].parameters.x"),
    ("response_format.json_schema.schema.properties.x", "text.format.schema.properties.x"),
    ("response_format.type", "text.format.type"),
    ("tool_choice.function.name", "tool_choice.name"),
    ("tool_choice.allowed_tools.tools[0].function.name", "tool_choice.tools[0].name"),
    ("reasoning_effort", "reasoning.effort"),
    ("max_completion_tokens", "max_output_tokens"),
    ("temperature", "temperature"),
    (None, None),
)
def test_errors_name_the_field_as_the_request_spells_it(chats, ours):
    with pytest.raises(BadRequest) as refused, our_names():
        raise BadRequest(f"{chats}: no", param=chats)
    assert refused.value.param == ours
    assert refused.value.message == f"{ours}: no"


@rows(
    "choice, param",
    ({"type": "function"}, "tool_choice.name"),
    ({"type": "function", "name": "f", "x": 1}, "tool_choice.x"),
    ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}, "tool_choice.tools[0].name"),
)
def test_a_wrong_choice_of_tools_names_the_field(choice, param):
    wire = ResponsesRequest.model_validate({"input": "Hi", "tool_choice": choice})
    with pytest.raises(BadRequest) as refused:
        chat_request(wire, [])
    assert (refused.value.param, refused.value.message.partition(": ")[0]) == (param, param)
