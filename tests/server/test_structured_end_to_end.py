"""Bound answers of the bundled model: the official client's helpers, streams, choices, stop strings, hot sampling."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.conftest import WEATHER
from tests.server.schemas import INTEGER, SCHEMAS, closed, string
from tests.server.test_json_schemas import faults
from tests.tables import rows

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
OTHER = {"type": "function", "function": {"name": "get_time", "parameters": closed(zone=string(maxLength=9))}}
QUICK = 6


class Capital(BaseModel):
    """The answer to a question about a capital."""

    country: Literal["France", "Italy"]
    capital: str = Field(min_length=2, max_length=12)
    population: int = Field(ge=1, le=9999)


class GetWeather(BaseModel):
    """Weather of a city"""

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=7)


@pytest.fixture
def client(bundled_url):
    with openai.OpenAI(base_url=f"{bundled_url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        yield client


@pytest.fixture
def ask(client):
    def create(**fields):
        extra = {key: fields.pop(key) for key in ("structured_outputs", "min_tokens") if key in fields}
        fields = {"messages": QUESTION, "max_tokens": 500, "seed": 7, **fields}
        return client.chat.completions.create(model="tiny-gpt-oss", extra_body=extra, **fields)

    return create


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def check_answer(ask, schema, **fields):
    """The answer satisfies the schema; False if the token budget cut it short."""
    choice = ask(response_format=schema_format(schema), **fields).choices[0]
    if choice.finish_reason == "length":
        return False
    assert faults(schema, choice.message.content) == [], choice.message.content
    return True


def test_pydantic_models_are_parsed(client):
    request = {"model": "tiny-gpt-oss", "messages": QUESTION, "temperature": 1.5, "seed": 1, "max_tokens": 500}
    message = client.chat.completions.parse(response_format=Capital, **request).choices[0].message
    assert isinstance(message.parsed, Capital)
    tool = openai.pydantic_function_tool(GetWeather)
    request["tool_choice"] = "required"
    [call] = client.chat.completions.parse(tools=[tool], **request).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)


@rows("temperature", 0, 1.5)
@rows(
    "choice, name",
    ("required", None),
    ({"type": "function", "function": {"name": "get_time"}}, "get_time"),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "get_weather"}}]}}, "get_weather"),
)  # fmt: skip
def test_a_call_is_forced_by_name_or_not(ask, choice, name, temperature):
    """The question needs none."""
    answer = ask(tools=[WEATHER, OTHER], tool_choice=choice, temperature=temperature).choices[0]
    assert answer.finish_reason == "tool_calls"
    [call] = answer.message.tool_calls
    assert call.function.name in ("get_weather", "get_time") if name is None else (name,)
    tool = {"get_weather": WEATHER, "get_time": OTHER}[call.function.name]
    assert faults(tool["function"]["parameters"], call.function.arguments) == []


def test_no_call_is_made_with_none(ask):
    """The model would call, because the conversation has shown it how."""
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "user", "content": "What is the weather in Rome?"},
    ]  # fmt: skip
    for seed in range(3):
        choice = ask(messages=messages, tools=[WEATHER], tool_choice="none", seed=seed, temperature=1.0).choices[0]
        assert choice.message.tool_calls is None
        assert "get_weather" not in (choice.message.content or "")
        assert choice.finish_reason == "stop"


@rows("fields", {"response_format": schema_format(closed(a=INTEGER))}, {"tools": [WEATHER], "tool_choice": "required"})
def test_streamed_equals_whole(ask, fields):
    fields |= {"temperature": 1.0, "n": 2}
    whole = {choice.index: choice for choice in ask(**fields).choices}
    texts = {0: "", 1: ""}
    reasons = {}
    for chunk in ask(stream=True, **fields):
        for choice in chunk.choices:
            calls = choice.delta.tool_calls or []
            texts[choice.index] += (choice.delta.content or "") + "".join(call.function.arguments for call in calls)
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    for index, choice in whole.items():
        calls = choice.message.tool_calls or []
        assert texts[index] == (choice.message.content or "") + "".join(call.function.arguments for call in calls)
        assert reasons[index] == choice.finish_reason
        json.loads(texts[index])


def test_log_probabilities_cover_the_content(ask):
    choice = ask(response_format=schema_format(closed(a=INTEGER)), logprobs=True, top_logprobs=2).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    assert all(entry.logprob <= 0 for entry in entries)


def test_a_stop_string_cuts_a_bound_answer(ask):
    choice = ask(response_format=schema_format(closed(answer={"const": "abcdef"})), stop=["cd"]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content.endswith('"ab')


@rows(
    "outputs, pattern",
    ({"choice": ["Rome", "Oslo"]}, "Rome|Oslo"),
    ({"regex": "[A-Z]{3}-\\d{2,4}"}, "[A-Z]{3}-[0-9]{2,4}"),
    ({"grammar": 'root ::= "a" [b-d]{1,5} "e"'}, "a[b-d]{1,5}e"),
    ({"json": closed(a={"enum": [1, 2]})}, r'\{\s*"a"\s*:\s*[12]\s*\}'),
    ({"structural_tag": {"type": "const_string", "value": "fixed"}}, "fixed"),
)
@rows("endpoint", "chat", "completions")
def test_other_forms_of_answers(ask, client, outputs, pattern, endpoint):
    if endpoint == "chat":
        text = ask(structured_outputs=outputs, temperature=1.5).choices[0].message.content
    else:
        request = {"model": "tiny-gpt-oss", "prompt": "The", "max_tokens": 200, "temperature": 1.5, "seed": 1}
        text = client.completions.create(**request, extra_body={"structured_outputs": outputs}).choices[0].text
    assert re.fullmatch(pattern, text)


def test_a_grammar_that_cannot_be_compiled_is_refused_with_its_place(ask):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(structured_outputs={"grammar": "root ::= missing"})
    assert caught.value.param == "structured_outputs.grammar"
    assert "missing" in caught.value.message


def test_answers_of_some_schemas_at_high_temperature(ask):
    names = list(SCHEMAS)[:: len(SCHEMAS) // QUICK]
    ended = [check_answer(ask, SCHEMAS[name], temperature=1.5, max_tokens=150) for name in names]
    assert sum(ended) >= len(names) // 2


@pytest.mark.evals
@pytest.mark.timeout(1800)
def test_answers_of_all_schemas(ask):
    """At every temperature. An answer that the token budget cuts short is none: a hot model writes long strings."""
    cases = [(name, temperature) for name in SCHEMAS for temperature in (0.0, 1.0, 1.5)]

    def check(case):
        name, temperature = case
        return check_answer(ask, SCHEMAS[name], temperature=temperature, max_tokens=300)

    with ThreadPoolExecutor(8) as threads:
        ended = list(threads.map(check, cases))
    cut = [case for case, has_ended in zip(cases, ended, strict=True) if not has_ended]
    assert len(cut) < len(cases) / 4, cut
