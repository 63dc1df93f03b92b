"""Every feature in every dialect at every endpoint that has it, streamed and whole: one table of cells over HTTP.

A scripted model first wants to write what the feature forbids. So a cell fails if a request's fields do not reach the
model, if the grammar allows too much or too little, if an answer is read wrongly, or if a stream says something else.
The cells that the bundled model can know are asked again of the real service.
"""

import json
import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from loaders.tokenizer import load_tokenizer
from tests.server.api_readers import APIS, Said, ask, ask_streamed
from tests.server.conftest import ASSETS, WEATHER, FakeEngine, serve
from tests.server.schemas import INTEGER, closed, string
from tests.server.scripted_model import Call, DeepSeek, Harmony, ScriptedModel, deepseek_tokenizer
from tests.tables import rows

QUESTION, THOUGHT = "What is the capital of France?", "The user asks {something}."
PARIS = "The capital of France is Paris."
NOTHING = ""  # to end the turn at once; text before a forced call is allowed in DeepSeek's dialect
CITY = closed(city=string())
DAYS = closed(days=INTEGER)
ROME, NO_CITY = Call("get_weather", '{"city": "Rome"}'), Call("get_weather", '{"city": null}')
ZONE = Call("get_time", '{"zone": "CET"}')
TOOLS = {"get_weather": WEATHER["function"], "get_time": {"name": "get_time", "parameters": closed(zone=string())}}
STRICT = {"get_weather": {**TOOLS["get_weather"], "parameters": CITY, "strict": True}}
REGEX = {"structured_outputs": {"regex": "[A-Z]{3}-[0-9]{2}"}}


def with_tools(tools, *choices):
    """Fields for some tools and the choice among them, which each API words in its own way."""
    return {
        name: {"tools": api.tools(tools.values()), "tool_choice": choice}
        for (name, api), choice in zip(APIS.items(), choices, strict=True)
    }


@dataclass
class Feature:
    """What is asked for, by API; what the model wants to write, most wanted first; and what a client must get."""

    fields: dict[str, dict[str, Any]] = field(default_factory=lambda: {"chat": {}, "responses": {}, "messages": {}})
    wishes: tuple[str | Call, ...] = (PARIS,)
    texts: tuple[str, ...] = (PARIS,)  # one for each choice
    calls: tuple[tuple[str, Any], ...] = ()
    has_logprobs: bool = False


EFFORT = {
    "chat": {"reasoning_effort": "low"},
    "responses": {"reasoning": {"effort": "low"}},
    "messages": {"output_config": {"effort": "low"}},
}
FEATURES = {
    "plain": Feature(),
    "tools auto": Feature(
        with_tools(TOOLS, "auto", "auto", {"type": "auto"}), (ROME, PARIS), ("",), (("get_weather", {"city": "Rome"}),)
    ),
    "required": Feature(
        with_tools(TOOLS, "required", "required", {"type": "any"}),
        (NOTHING, NO_CITY, ROME),
        ("",),
        (("get_weather", {"city": "Rome"}),),
    ),
    "named": Feature(
        with_tools(
            TOOLS,
            {"type": "function", "function": {"name": "get_time"}},
            {"type": "function", "name": "get_time"},
            {"type": "tool", "name": "get_time"},
        ),
        (NOTHING, ROME, ZONE),
        ("",),
        (("get_time", {"zone": "CET"}),),
    ),
    "strict": Feature(
        with_tools(STRICT, "auto", "auto", {"type": "auto"}),
        (ZONE, NO_CITY, ROME),
        ("",),
        (("get_weather", {"city": "Rome"}),),
    ),
    "json_schema": Feature(
        {
            "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "days", "schema": DAYS}}},
            "responses": {"text": {"format": {"type": "json_schema", "name": "days", "schema": DAYS}}},
            "messages": {"output_config": {"format": {"type": "json_schema", "schema": DAYS}}},
        },
        ("Three days.", '{"days": "three"}', '{"days": 3}'),
        ('{"days": 3}',),
    ),
    "regex": Feature({"chat": REGEX}, ("abc", "ABC-12"), ("ABC-12",)),
    "logprobs": Feature(
        {
            "chat": {"logprobs": True, "top_logprobs": 2},
            "responses": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        },
        has_logprobs=True,
    ),
    "reasoning": Feature(EFFORT),
    "stop": Feature(
        {"chat": {"stop": ["France", "x"]}, "messages": {"stop_sequences": ["France", "x"]}},
        texts=("The capital of ",),
    ),
    "n=2": Feature({"chat": {"n": 2}}, (PARIS, "Paris."), (PARIS, "Paris.")),
}
# DeepSeek's template has a switch: each way to turn it on and off, by API.
SWITCHES = {
    "chat": (
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"}, False),
        ({"reasoning_effort": "minimal"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"thinking_token_budget": 50}, True),
        ({"thinking_token_budget": 0}, False),
    ),
    "responses": (({"reasoning": {"effort": "high"}}, True), ({"reasoning": {"effort": "none"}}, False)),
    "messages": (
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, False),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, True),
    ),
}

# Cells that an API does not have: the fields that are refused, the one that the error names, and why there is no other.
ABSENT = {
    ("regex", "responses"): (REGEX, "structured_outputs", "OpenAI's API has JSON schemas only, with `pattern`"),
    ("regex", "messages"): (REGEX, "structured_outputs", "Anthropic's API has JSON schemas only, with `pattern`"),
    ("logprobs", "messages"): ({"logprobs": True}, "logprobs", "Anthropic's API has none"),
    ("stop", "responses"): ({"stop": ["x"]}, "stop", "OpenAI's API has no stop strings there"),
    ("n=2", "responses"): ({"n": 2}, "n", "one answer a request"),
    ("n=2", "messages"): ({"n": 2}, "n", "one answer a request"),
}


@pytest.fixture(scope="module")
def dialects(tmp_path_factory):
    """For each dialect its model and the client of its service."""
    folder = tmp_path_factory.mktemp("dialects")
    spoken = {
        "harmony": Harmony(load_tokenizer(ASSETS)),
        "deepseek": DeepSeek(deepseek_tokenizer(folder / "plain")),
        "deepseek, thinking": DeepSeek(deepseek_tokenizer(folder / "thinking", thinks=True)),
    }
    with ExitStack() as stack:
        found = {}
        for name, dialect in spoken.items():
            model = ScriptedModel(dialect)
            service = stack.enter_context(serve(FakeEngine(script=model), dialect.tokenizer))
            found[name] = model, stack.enter_context(service.http())
        yield found


def refusal(http, api, fields):
    """The message of the error that some fields get."""
    response = http.post(api.path, json={**api.question(QUESTION), **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


@rows("dialect", "harmony", "deepseek", "deepseek, thinking")
@rows("name", *FEATURES)
@rows("api", *APIS)
def test_a_cell(dialects, dialect, name, api):
    model, http = dialects[dialect]
    feature, endpoint = FEATURES[name], APIS[api]
    fields = feature.fields.get(api)
    if fields is None:
        absent, param = ABSENT[name, api][:2]
        assert param in refusal(http, endpoint, absent)
        return
    model.wish(THOUGHT, feature.wishes)
    asked = {**endpoint.question(QUESTION), **fields}
    whole, streamed = ask(http, endpoint, asked), ask_streamed(http, endpoint, asked)
    assert streamed == whole
    thinks = dialect != "deepseek" or name == "reasoning"
    finish = "tool_calls" if feature.calls else "stop"
    assert [_without_logprobs(said) for said in whole.choices] == [
        Said(THOUGHT if thinks else "", text, list(feature.calls), finish) for text in feature.texts
    ]
    for said in whole.choices:
        check_logprobs(said, 2 if feature.has_logprobs else None)
    check_usage(whole, model, is_cut=name == "stop", thinks=thinks)


def _without_logprobs(said):
    return Said(said.reasoning, said.text, said.calls, said.finish)


def check_logprobs(said, num_top):
    """One entry for each token of the text, with its alternatives; the scripted engine's numbers name the token."""
    if num_top is None:
        assert said.logprobs == []
        return
    assert b"".join(bytes(entry["bytes"]) for entry in said.logprobs).decode() == said.text
    assert [len(entry["top_logprobs"]) for entry in said.logprobs] == [num_top] * len(said.logprobs)
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] <= 0 for entry in said.logprobs)


def check_usage(answer, model, *, is_cut, thinks):
    """The same tokens that the model read and wrote; it was asked twice."""
    _, num_generated, num_reasoning = answer.usage
    num_written = sum(map(len, model.written)) // 2
    assert num_generated < num_written if is_cut else num_generated == num_written
    per_choice = len(model.dialect.tokenizer.encode(THOUGHT)) * len(answer.choices)
    assert num_reasoning == (per_choice if thinks else 0)


def test_every_cell_is_asked_or_listed():
    """A cell that an API lacks has a reason, and no cell that is listed as absent is asked."""
    missing = {(name, api) for name, feature in FEATURES.items() for api in APIS if api not in feature.fields}
    assert missing == set(ABSENT)
    assert all(reason for *_, reason in ABSENT.values())


@rows("dialect", "deepseek", "deepseek, thinking")
@rows("api", *APIS)
def test_a_request_turns_deepseeks_reasoning_on_and_off(dialects, dialect, api):
    model, http = dialects[dialect]
    endpoint = APIS[api]
    for fields, thinks in (({}, dialect == "deepseek, thinking"), *SWITCHES[api]):
        model.wish(THOUGHT, (PARIS,))
        asked = {**endpoint.question(QUESTION), **fields}
        whole = ask(http, endpoint, asked)
        assert whole.choices == [Said(THOUGHT if thinks else "", PARIS, [], "stop")], fields
        assert ask_streamed(http, endpoint, asked) == whole
    effort = {"messages": {"output_config": {"effort": "huge"}}, "chat": {"reasoning_effort": "huge"}}
    assert "effort" in refusal(http, endpoint, effort.get(api, {"reasoning": {"effort": "huge"}}))


WEATHER_QUESTION = "What is the weather in Rome?"
# What the bundled model must say: the question, and whether an answer of one choice is right.
KNOWN = {
    "plain": (QUESTION, lambda said: "Paris" in said.text),
    "tools auto": (WEATHER_QUESTION, lambda said: said.calls == [("get_weather", {"city": "Rome"})]),
    "required": (WEATHER_QUESTION, lambda said: said.calls == [("get_weather", {"city": "Rome"})]),
    "named": (WEATHER_QUESTION, lambda said: [(name, [*arguments]) for name, arguments in said.calls] == [ZONE_KEYS]),
    "strict": (WEATHER_QUESTION, lambda said: said.calls == [("get_weather", {"city": "Rome"})]),
    "json_schema": (QUESTION, lambda said: type(json.loads(said.text)["days"]) is int),
    "regex": (QUESTION, lambda said: re.fullmatch("[A-Z]{3}-[0-9]{2}", said.text)),
    "logprobs": (QUESTION, lambda said: "Paris" in said.text),
    "reasoning": (QUESTION, lambda said: "Paris" in said.text),
    "stop": (QUESTION, lambda said: said.text and "France" not in said.text),
    "n=2": (QUESTION, lambda said: "Paris" in said.text),
}
ZONE_KEYS = ("get_time", ["zone"])


@pytest.fixture
def bundled(bundled_url):
    with httpx2.Client(base_url=bundled_url, timeout=120, verify=False) as http:
        yield http


def check_bundled(http, name, api):
    """The right answer, streamed and whole. The last bits of log-probabilities differ: the second prompt is cached."""
    feature, endpoint, (question, is_right) = FEATURES[name], APIS[api], KNOWN[name]
    fields = feature.fields.get(api)
    if fields is None:
        return
    asked = {**endpoint.question(question), "temperature": 0, **fields}
    whole = ask(http, endpoint, asked, model="tiny-gpt-oss")
    streamed = ask_streamed(http, endpoint, asked, model="tiny-gpt-oss")
    assert [_without_logprobs(said) for said in streamed.choices] == [_without_logprobs(said) for said in whole.choices]
    assert streamed.usage == whole.usage
    for said, again in zip(whole.choices, streamed.choices, strict=True):
        assert is_right(said), said
        assert said.finish == ("tool_calls" if feature.calls else "stop")
        check_logprobs(said, 2 if feature.has_logprobs else None)
        assert [entry["bytes"] for entry in again.logprobs] == [entry["bytes"] for entry in said.logprobs]


@rows("name", "plain", "tools auto")
@rows("api", *APIS)
def test_a_cell_of_the_bundled_model(bundled, name, api):
    check_bundled(bundled, name, api)


@pytest.mark.evals
@rows("name", *KNOWN)
@rows("api", *APIS)
def test_every_cell_of_the_bundled_model(bundled, name, api):
    check_bundled(bundled, name, api)
