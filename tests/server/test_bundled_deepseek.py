"""The real service with the bundled DeepSeek-V3 models: FP8 blocks and NVFP4, thinking and not, tools, a far memory."""

import json

import httpx2
import openai
import pytest

from evals import tiny
from evals.client import Client
from tests.server.conftest import WEATHER
from tests.server.service_process import start_bundled
from tests.tables import rows

MODELS = ("tiny-deepseek-v3", "tiny-deepseek-v3-nvfp4")
THINKING = {"reasoning_effort": "high"}


@pytest.fixture(scope="module", params=MODELS)
def served(request, tmp_path_factory):
    """(name, URL)"""
    with start_bundled(tmp_path_factory.mktemp("service"), "--model", request.param) as service:
        yield request.param, service.url


@pytest.fixture
def complete(served):
    name, url = served
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        def completed(*messages, **fields):
            said = [{"role": role, "content": text} for role, text in messages]
            return client.chat.completions.create(model=name, messages=said, temperature=0, **fields)

        yield completed


@pytest.fixture
def ask(complete):
    return lambda *messages, **fields: complete(*messages, **fields).choices[0]


def test_every_layer_takes_the_format_of_the_files(served):
    name, url = served
    engine = httpx2.get(f"{url}/health/ready").json()["engine"]
    kind = "nvfp4" if "nvfp4" in name else "fp8_block"
    assert engine["moe_paths"] == [f"layer {layer}: torch / none / {kind}" for layer in range(1, 5)]


@rows(
    "question, right",
    ("What is the capital of France?", "Paris"),
    ("What is 347 + 589?", "936"),
    ("Sort these numbers: 45, 12, 78, 3", "3, 12, 45, 78"),
)
def test_it_answers_with_thinking_and_without(ask, question, right):
    direct = ask(("user", question))
    assert right in direct.message.content
    assert direct.message.reasoning is None
    thought = ask(("user", question), extra_body=THINKING)
    assert right in thought.message.content
    assert thought.message.reasoning


@rows("fields", {}, THINKING, {"add_generation_prompt": False})
def test_no_line_breaks_stand_before_a_bound_answer(complete, fields):
    body = {"structured_outputs": {"choice": ["yes", "no"]}} | fields
    choice = complete(("user", "hi"), logprobs=True, extra_body=body).choices[0]
    assert choice.message.content in ("yes", "no")
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    chunks = complete(("user", "hi"), stream=True, extra_body=body)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


@rows("prompt, shown", ("Hello 日本", ["", "Hello 日本"]), ("<bos>Hello", ["<bos>", "Hello"]), ("", ["", ""]))
def test_an_echo_is_the_prompt_that_was_sent(served, prompt, shown):
    """Without the BOS token that the tokenizer put before it; the token keeps its entry."""
    name, url = served
    bos = "<｜begin▁of▁sentence｜>"
    body = {"model": name, "prompt": prompt.replace("<bos>", bos), "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = httpx2.post(f"{url}/v1/completions", json=body).json()["choices"][0]
    tokens = answer["logprobs"]["tokens"]
    assert [tokens[0], "".join(tokens[1:])] == [text.replace("<bos>", bos) for text in shown]
    assert answer["text"] == "".join(tokens)
    assert answer["logprobs"]["text_offset"][:2] == [0, len(tokens[0])][: len(tokens)]


def test_each_prompt_is_echoed_as_it_was_sent(served):
    name, url = served
    body = {"model": name, "prompt": ["Hello", "日本"], "n": 2, "echo": True, "max_tokens": 0}
    choices = httpx2.post(f"{url}/v1/completions", json=body).json()["choices"]
    assert [choice["text"] for choice in choices] == ["Hello", "Hello", "日本", "日本"]


@rows("fields", {}, THINKING)
def test_it_calls_a_function(ask, fields):
    choice = ask(("user", "What is the weather in Paris?"), tools=[WEATHER], extra_body=fields)
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


@rows("choice", "required", {"type": "function", "function": {"name": "get_weather"}})
@rows("fields", {}, THINKING, {"parallel_tool_calls": False})
def test_a_forced_call_comes_at_once(complete, choice, fields):
    """Text without end came first, from a model that would rather answer."""
    forced = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 400, "extra_body": fields}
    message = complete(("user", "Say hi"), **forced).choices[0].message
    assert not message.content
    assert bool(message.reasoning) is (fields is THINKING)
    call = message.tool_calls[0].function
    assert call.name == "get_weather"
    assert call.arguments.startswith('{"city": "')
    deltas = [chunk.choices[0].delta for chunk in complete(("user", "Say hi"), stream=True, **forced)]
    assert not any(delta.content for delta in deltas)
    pieces = [each.function for delta in deltas for each in delta.tool_calls or [] if each.index == 0]
    assert (pieces[0].name, "".join(piece.arguments for piece in pieces)) == (call.name, call.arguments)


def test_it_remembers_what_was_said_thousands_of_tokens_ago(ask):
    filler = [("user", "What is 347 + 589?"), ("assistant", "347 + 589 = 936.")] * 90
    told = [("user", "My name is Anna."), ("assistant", "Nice to meet you, Anna.")]
    choice = ask(*told, *filler, ("user", "What is my name?"))
    assert "Anna" in choice.message.content


@pytest.mark.timeout(600)
@pytest.mark.evals
@rows("fields", {}, THINKING)
def test_it_reaches_the_bars_of_its_card_over_http(served, fields):
    name, url = served
    client = Client(base_url=f"{url}/v1", model=name, timeout_s=300.0)
    for category, items in tiny.load(["addition", "facts", "reversing", "memory", "tools"], 40).items():
        done, _ = tiny.evaluate(client, category, items, {"temperature": 0, "max_tokens": 400} | fields, 8)
        assert sum(item.score == 1 for item in done) >= 0.9 * len(done), category
