"""Messages and tools over HTTP: what clients send back (G20, G21), calls that nobody offered (G26), their counters."""

import json
from itertools import pairwise

import pytest

from tests.server.conftest import ANSWER, CALL, MODEL, WEATHER
from tests.tables import rows

USER = {"role": "user", "content": "What is the weather?"}
FUNCTION = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
TURN = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": FUNCTION}]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
TWO_CALLS = (
    '<|channel|>commentary to=functions.get_weather<|message|>{"n": 1}<|end|>'
    '<|start|>assistant<|channel|>commentary to=functions.get_time<|message|>{"n": 2}<|call|>'
)
TIME = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture
def ask(service, harmony):
    """POST a chat; the engine answers with the transcript, a token at a time."""
    with service.http() as http:

        def post(messages=(USER,), transcript=ANSWER, **fields):
            service.engine.script = lambda _request: [[i] for i in harmony(transcript)]
            return http.post("/v1/chat/completions", json={"model": MODEL, "messages": list(messages), **fields})

        yield post


@pytest.fixture
def counted(service):
    """Growth of a counter since the last look."""
    last = {}

    def growth(name):
        with service.http() as http:
            lines = http.get("/metrics").text.splitlines()
        value = sum(float(line.split()[-1]) for line in lines if line.startswith(f"moe_serve_{name}_total"))
        grown, last[name] = value - last.get(name, 0), value
        return grown

    for name in ("ignored_keys", "empty_answers", "undeclared_tool_calls"):
        growth(name)
    return growth


def deltas(response):
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(event)["choices"][0]["delta"] for event in events]


def with_keys(value, **keys):
    return {**value, **keys}


CALL_OF = TURN["tool_calls"][0]
UNKNOWN_KEYS = [
    ([with_keys(USER, type="text")], 1),  # G20
    ([with_keys(USER, cache_control={"type": "ephemeral"}, id="m1")], 2),
    (
        [
            USER,
            with_keys(TURN, provider_specific_fields={"a": None}, thinking_blocks=[], reasoning_details=[{}]),
            RESULT,
        ],
        3,
    ),
    ([USER, with_keys(TURN, tool_calls=[with_keys(CALL_OF, extra_content={"google": {}})]), RESULT], 1),
    ([USER, with_keys(TURN, tool_calls=[with_keys(CALL_OF, function=with_keys(FUNCTION, x=1))]), RESULT], 1),
    ([USER, with_keys(TURN, annotations=[], refusal=None, audio=None, function_call=None, reasoning=None), RESULT], 0),
    ([USER, with_keys(TURN, tool_calls=[with_keys(CALL_OF, type=None, index=0)]), with_keys(RESULT, type="x")], 1),
]


@rows("messages, num_ignored", *UNKNOWN_KEYS)
def test_unknown_keys_in_messages_are_ignored_and_counted_g20_g21(ask, counted, messages, num_ignored):
    response = ask(messages)
    assert response.status_code == 200, response.text
    assert counted("ignored_keys") == num_ignored


def test_unknown_keys_in_tools_are_ignored_and_counted_g21(ask, counted):
    tool = with_keys(WEATHER, cache_control={}, function=with_keys(WEATHER["function"], examples=[]))
    assert ask(tools=[tool]).status_code == 200
    assert counted("ignored_keys") == 2


def test_unknown_keys_at_the_top_level_are_refused_g21(ask):
    response = ask(no_such_field=1)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "no_such_field")


@rows(
    "message, words",
    ({"role": "assistant", "refusal": "I will not."}, "I will not."),
    ({"role": "assistant", "content": "Sorry.", "refusal": "I will not."}, "Sorry.\nI will not."),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}, "I will not."),
    ({"role": "user", "content": "Hm.", "refusal": "no"}, "Hm."),
)
def test_a_refusal_is_what_the_assistant_said_g21(ask, service, tokenizer, message, words):
    assert ask([USER, message, USER]).status_code == 200
    assert f"<|message|>{words}<|end|>" in tokenizer.decode(service.engine.requests[-1].prompt_ids)


@rows("said", {"content": None, "reasoning": None}, {}, {"content": None, "tool_calls": []}, {"refusal": ""})
def test_an_answer_without_words_may_be_sent_back_g21_g24(ask, service, said):
    """An answer that `max_tokens` cut while thinking has neither content nor calls."""
    assert ask([USER, {"role": "assistant", "content": ""}, USER]).status_code == 200
    assert ask([USER, {"role": "assistant", **said}, USER]).status_code == 200
    written, sent_back = (request.prompt_ids for request in service.engine.requests[-2:])
    assert sent_back == written


def test_the_message_of_a_cut_answer_is_accepted_as_it_came_g21(ask):
    message = ask(transcript="<|channel|>", max_tokens=1).json()["choices"][0]["message"]
    assert message["content"] is None
    response = ask([USER, message, USER])
    assert response.status_code == 200, response.text


@rows("function", {"name": "f"}, {"name": "f", "arguments": None}, {"name": "f", "arguments": {}})
def test_missing_and_null_arguments_are_an_empty_object_g21(ask, service, tokenizer, function):
    turn = {"role": "assistant", "tool_calls": [{"id": "c1", "function": function}]}
    assert ask([USER, turn, RESULT]).status_code == 200
    assert "<|message|>{}<|call|>" in tokenizer.decode(service.engine.requests[-1].prompt_ids)


@rows("stream", False, True)
@rows("fields", {}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": [TIME]}, {"tools": []})
def test_a_call_that_nobody_offered_is_text_and_counted_g26(ask, counted, stream, fields):
    response = ask(transcript=CALL, stream=stream, **fields)
    if stream:
        parts = deltas(response)
        assert "".join(part.get("content") or "" for part in parts) == 'get_weather {"city": "Paris"}'
        assert not any("tool_calls" in part for part in parts)
    else:
        choice = response.json()["choices"][0]
        assert choice["message"]["content"] == 'get_weather {"city": "Paris"}'
        assert (choice["message"].get("tool_calls"), choice["finish_reason"]) == (None, "stop")
    assert counted("undeclared_tool_calls") == 1
    assert counted("empty_answers") == 0


def test_streamed_calls_keep_their_numbers(ask):
    """Reports of the second list, section G: arguments of the second call must not join the first."""
    parts = [
        c
        for d in deltas(ask(transcript=TWO_CALLS, tools=[WEATHER, TIME], stream=True))
        for c in d.get("tool_calls", [])
    ]
    arguments = {0: "", 1: ""}
    for part in parts:
        arguments[part["index"]] += part["function"].get("arguments", "")
    assert arguments == {0: '{"n": 1}', 1: '{"n": 2}'}
    opened = [part for part in parts if "id" in part]
    assert [(part["index"], part["function"]["name"]) for part in opened] == [(0, "get_weather"), (1, "get_time")]
    assert all(a["index"] <= b["index"] for a, b in pairwise(parts))
    whole = ask(transcript=TWO_CALLS, tools=[WEATHER, TIME]).json()["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in whole] == ['{"n": 1}', '{"n": 2}']


@rows(
    "transcript, num_empty",
    ("<|channel|>analysis<|message|>Hm.<|end|><|return|>", 1),
    ("<|channel|>final<|message|><|return|>", 1),
    ("<|channel|>final Paris", 0),
    (ANSWER, 0),
    (CALL, 0),
)
def test_answers_with_tokens_and_without_text_are_counted_g27(ask, counted, transcript, num_empty):
    message = ask(transcript=transcript, tools=[WEATHER]).json()["choices"][0]["message"]
    assert (message["content"] is None and "tool_calls" not in message) == bool(num_empty)
    assert counted("empty_answers") == num_empty
    assert counted("undeclared_tool_calls") == 0
