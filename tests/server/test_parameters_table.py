"""The table of parameters in docs/api.md: complete, and true of what the service does with each of them."""

import inspect
import re
from pathlib import Path

import pytest
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions

from server.schema.chat import ChatCompletionRequest
from server.schema.completions import CompletionRequest
from tests.server.conftest import CALL, FakeEngine, serve
from tests.tables import rows

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
CLIENT_ONLY = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
WAYS = {"honoured", "harmless", "refused", ""}
TOOL = {"type": "function", "function": {"name": "get_weather"}}
CONTINUED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
BASE = {
    "chat": {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0.5},
    "completions": {"prompt": "Hello there", "temperature": 0.5},
}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
CHANGES = {  # a value that changes the answer or what the engine is asked, and what else it needs to be told
    "messages": ([{"role": "user", "content": "Bye"}], {}),
    "prompt": ("Good bye", {}),
    "model": ("other", {}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "max_tokens": (1, {}),
    "max_completion_tokens": (2, {}),
    "min_tokens": (3, {}),
    "n": (2, {}),
    "best_of": (2, {"n": 2}),
    "temperature": (0.1, {}),
    "top_p": (0.3, {}),
    "top_k": (5, {}),
    "min_p": (0.2, {}),
    "seed": (7, {}),
    "timeout": (30.5, {}),
    "presence_penalty": (0.5, {}),
    "frequency_penalty": (0.5, {}),
    "repetition_penalty": (1.5, {}),
    "logit_bias": ({"5": 1.0}, {}),
    "stop": ("nothing to", {}),
    "include_stop_str_in_output": (True, {"stop": "nothing"}),
    "stop_token_ids": ([9], {}),
    "ignore_eos": (True, {}),
    "logprobs": ({"chat": True, "completions": 0}, {}),
    "top_logprobs": (2, {"logprobs": True}),
    "logprob_token_ids": ([9], {"logprobs": {"chat": True, "completions": 0}}),
    "prompt_logprobs": (1, {}),
    "echo": (True, {}),
    "return_token_ids": (True, {}),
    "return_timings": (True, {}),
    "skip_special_tokens": (False, {}),
    "priority": (3, {}),
    "cache_salt": ("mine", {}),
    "tools": ([TOOL], {}),
    "tool_choice": ("none", {"tools": [TOOL]}),
    "parallel_tool_calls": (False, {"tools": [TOOL]}),
    "response_format": ({"type": "json_object"}, {}),
    "structured_outputs": ({"regex": "a+"}, {}),
    "reasoning_effort": ("high", {}),
    "thinking_token_budget": (5, {}),
    "chat_template_kwargs": ({"reasoning_effort": "low"}, {}),
    "add_generation_prompt": (False, {}),
    "continue_final_message": (True, {"messages": CONTINUED}),
}
SAME = {"best_of", "timeout"}
"""Honoured parameters with a value that changes nothing."""
ACCEPTED = {"modalities": ["text"], "metadata": {"a": "b"}, "store": True}
CALLS = (
    "<|channel|>analysis<|message|>Think. nothing to see<|end|>"
    + 2 * f"<|start|>assistant{CALL.split('assistant')[1]}".replace("<|call|>", "<|end|>")
)


def table():
    """(parameter, endpoint, what happens) of each cell."""
    lines = re.findall(r"^\| `(\w+)` \| (\w*) ?\| (\w*) ?\|", PAGE.read_text(), re.MULTILINE)
    assert len(lines) > 50
    return [(name, *cell) for name, *ways in lines for cell in zip(("chat", "completions"), ways, strict=True)]


def parameters_of(create):
    return set(inspect.signature(create).parameters) - CLIENT_ONLY


@rows(
    "endpoint, create, model",
    ("chat", ChatCompletions.create, ChatCompletionRequest),
    ("completions", Completions.create, CompletionRequest),
)
def test_the_table_is_complete(endpoint, create, model):
    listed = [name for name, where, way in table() if where == endpoint and way]
    assert sorted(listed) == sorted(parameters_of(create) | set(model.model_fields) | set(listed))
    assert {way for _, _, way in table()} == WAYS
    assert len(set(listed)) == len(listed)


@pytest.fixture(scope="module")
def ask(tokenizer):
    """Send a body; returns the status, the answer without what is new each time, and what the engine was asked."""
    plain = tokenizer.encode("<|channel|>final<|message|>There is nothing to see.<|return|>")
    calls = tokenizer.encode(CALLS)

    def script(request):
        return calls if "get_weather" in tokenizer.decode(request.prompt_ids) else plain

    engine = FakeEngine(script=script)
    with serve(engine, tokenizer, served_model_name=("first", "other")) as service, service.http() as http:

        def send(endpoint, **fields):
            engine.forget()
            response = http.post(PATHS[endpoint], json={**BASE[endpoint], **of(fields, endpoint)})
            asked = [
                (each.prompt_ids, each.sampling, each.priority, each.cache_salt, each.grammar)
                for each in engine.requests
            ]
            said = re.sub(r'"(id|created)":("[^"]*"|\d+)', "", response.text)
            return response, said, asked

        yield send


def of(fields, endpoint):
    """The fields as an endpoint takes them."""
    return {
        name: value[endpoint] if isinstance(value, dict) and endpoint in value else value
        for name, value in fields.items()
    }


def test_each_parameter_is_treated_as_the_table_says(ask, subtests):
    for name, endpoint, way in table():
        with subtests.test(name=name, endpoint=endpoint, way=way):
            if way:
                CHECKS[way](ask, name, endpoint)


def check_honoured(ask, name, endpoint):
    value, others = CHANGES[name]
    response, *seen = ask(endpoint, **{name: value}, **others)
    assert response.status_code == 200, response.text
    assert (seen == list(ask(endpoint, **others)[1:])) == (name in SAME)


def check_harmless(ask, name, endpoint):
    response, *seen = ask(endpoint, **{name: ACCEPTED.get(name, "x")})
    assert response.status_code == 200, response.text
    assert seen == list(ask(endpoint)[1:])


def check_refused(ask, name, endpoint):
    for value in ("x", {"a": 1}, True):
        response, _, asked = ask(endpoint, **{name: value})
        assert (response.status_code, asked) == (400, [])
        assert response.json()["error"]["param"] == name
        assert name in response.json()["error"]["message"]
    assert ask(endpoint, **{name: None})[0].status_code == 200


CHECKS = {"honoured": check_honoured, "harmless": check_harmless, "refused": check_refused}


@pytest.fixture
def tolerant(tokenizer):
    with serve(FakeEngine(), tokenizer, tolerant=True) as service, service.http() as http:
        yield http


def test_unknown_parameters_are_refused_or_named_in_a_header(tokenizer):
    body = {"prompt": "Hi", "max_tokens": 1, "wörld\r\nx": 1, "temprature": 0.1, "nothing": None}
    with serve(FakeEngine(), tokenizer) as service, service.http() as http:
        answer = http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_parameter")
        assert "x-ignored-parameters" not in http.get("/v1/models").headers
    with serve(FakeEngine(), tokenizer, tolerant=True) as service, service.http() as http:
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert answer.headers["x-ignored-parameters"] == "w%C3%B6rld%0D%0Ax, temprature"
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            assert stream.headers["x-ignored-parameters"].endswith("temprature")
        large = {**body, "prompt": "a" * 100, "metadata": "b" * 70_000}  # read in another thread
        assert http.post("/v1/completions", json=large).headers["x-ignored-parameters"].endswith("temprature")
        many = {f"unknown{number}": 1 for number in range(100)}
        assert http.post("/v1/completions", json=body | many).status_code == 400
        assert "x-ignored-parameters" not in http.post("/v1/completions", json={"prompt": "Hi"}).headers


@rows(
    "path, fields",
    ("/v1/chat/completions", {"guided_json": {"type": "object"}}),
    ("/v1/chat/completions", {"guided_choice": ["a"]}),
    ("/v1/chat/completions", {"functions": [{"name": "f"}]}),
    ("/v1/chat/completions", {"function_call": "none"}),
    ("/v1/chat/completions", {"chat_template": "{{ messages }}"}),
    ("/v1/completions", {"guided_regex": "a+"}),
    ("/v1/completions", {"guided_grammar": 'root ::= "a"'}),
    ("/v1/completions", {"suffix": "x"}),
    ("/v1/responses", {"conversation": "conv_1"}),
    ("/v1/responses", {"prompt": {"id": "pmpt_1"}}),
    ("/v1/responses", {"truncation": "auto"}),
    ("/v1/responses", {"background": True}),
)
def test_tolerance_does_not_make_another_request(path, fields, tolerant):
    bodies = {"/v1/responses": {"input": "Hi"}, **{PATHS[endpoint]: body for endpoint, body in BASE.items()}}
    [name] = fields
    answer = tolerant.post(path, json={**bodies[path], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    answer = tolerant.post(path, json={**bodies[path], name: None, "unknown": 1})
    assert (answer.status_code, answer.headers["x-ignored-parameters"]) == (200, "unknown")
