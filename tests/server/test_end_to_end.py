"""The real service in its own process: the bundled model, the engine process, the official client, signals."""

import json
import os
import random
import threading
import time
from contextlib import ExitStack

import httpx2
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config

from tests.server.conftest import ASSETS, WEATHER, wait_until
from tests.server.service_process import start_bundled
from tests.tables import rows

PARIS = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def url(bundled_url):
    return bundled_url


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def stats_of(url):
    return httpx2.get(f"{url}/health/ready", verify=False).json()["stats"]


def test_it_knows_the_capital_of_france(client):
    answer = client.chat.completions.create(model="tiny-gpt-oss", messages=PARIS)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


@rows("fields", {"temperature": 0}, {"temperature": 1.0, "seed": 11})
def test_streaming_equals_non_streaming(client, fields):
    request = {"model": "tiny-gpt-oss", "messages": PARIS, "max_tokens": 60, "logprobs": True, **fields}
    whole = client.chat.completions.create(**request).choices[0]
    content, reasoning, entries, reason = "", "", [], None
    with client.chat.completions.create(stream=True, **request) as stream:
        for chunk in stream:
            [choice] = chunk.choices
            content += choice.delta.content or ""
            reasoning += (choice.delta.model_extra or {}).get("reasoning") or ""
            entries += choice.logprobs.content if choice.logprobs else []
            reason = choice.finish_reason or reason
    assert (content or None, reasoning or None, reason) == (
        whole.message.content,
        whole.message.reasoning,
        whole.finish_reason,
    )
    assert [entry.bytes for entry in entries] == [entry.bytes for entry in whole.logprobs.content]
    # Not the same bits: the second request finds its prompt in the prefix cache, and computes one row instead of many.
    expected = [entry.logprob for entry in whole.logprobs.content]
    assert [entry.logprob for entry in entries] == pytest.approx(expected, abs=1e-3)


def test_it_calls_a_function(client):
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = client.chat.completions.create(model="tiny-gpt-oss", messages=question, tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_scoring_agrees_with_generation_b14(client, tokenizer):
    """A token's score inside a prompt is the one it had as an alternative when it could have been generated."""
    ids = tokenizer.encode("The capital of France is")
    request = {"model": "tiny-gpt-oss", "temperature": 0}
    first = client.completions.create(prompt=ids, max_tokens=1, logprobs=20, **request).choices[0].logprobs
    expected = [(tokenizer.encode(name), score) for name, score in first.top_logprobs[0].items()]
    expected = [(token, score) for token, score in expected if len(token) == 1][:4]
    assert len(expected) == 4
    for token, score in expected:
        scored = client.completions.create(prompt=ids + token, max_tokens=0, logprobs=0, echo=True, **request)
        assert scored.choices[0].logprobs.token_logprobs[-1] == pytest.approx(score, abs=1e-3)


def test_scores_are_those_of_a_plain_forward_pass_b14(client):
    """Against transformers on the dequantized weights, before and after the prefix cache knows the prompt."""
    plain = AutoModelForCausalLM.from_pretrained(
        ASSETS, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    )
    rng = random.Random(7)
    for length in (2, 40, 600):  # 600: beyond a step's tokens, and beyond the sliding window
        ids = [rng.randrange(5, 4000) for _ in range(length)]
        with torch.inference_mode():
            logprobs_TV = torch.log_softmax(plain(torch.tensor([ids])).logits[0].float(), dim=-1)
        expected = [logprobs_TV[i, token].item() for i, token in enumerate(ids[1:])]
        for max_tokens in (0, 1):
            answer = client.completions.create(
                model="tiny-gpt-oss", prompt=ids, max_tokens=max_tokens, echo=True, logprobs=2, temperature=0
            )
            scores = answer.choices[0].logprobs.token_logprobs
            assert scores[0] is None
            assert scores[1:length] == pytest.approx(expected, abs=1e-3)
            assert len(scores) == length + max_tokens
        cached = client.completions.create(model="tiny-gpt-oss", prompt=ids, max_tokens=1).usage.prompt_tokens_details
        assert cached.cached_tokens == (length - 1) // 16 * 16


def test_many_clients_at_once_get_the_answers_they_get_alone(url, client):
    prompts = [f"{number} and {number + 1} are" for number in range(24)]

    def ask(prompt):
        return client.completions.create(model="tiny-gpt-oss", prompt=prompt, max_tokens=12, temperature=0.8, seed=5)

    alone = [ask(prompt).choices[0].text for prompt in prompts[:4]]
    together = [None] * len(prompts)

    def run(index):
        together[index] = ask(prompts[index]).choices[0].text

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together[:4] == alone
    assert all(isinstance(text, str) for text in together)
    wait_until(lambda: stats_of(url)["num_running"] == stats_of(url)["num_waiting"] == 0)


@rows("n", 1, 3)
def test_a_client_that_leaves_frees_its_pages(url, client, n):
    wait_until(lambda: stats_of(url)["num_running"] == 0)
    endless = {"max_tokens": 3000, "stream": True, "n": n, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model="tiny-gpt-oss", prompt="a", **endless) as stream:
        next(iter(stream))
        wait_until(lambda: stats_of(url)["num_running"] == n)
    wait_until(lambda: stats_of(url)["num_running"] == 0, 5)
    steps = stats_of(url)["num_steps"]
    time.sleep(0.6)
    assert stats_of(url)["num_steps"] == steps
    assert stats_of(url)["num_waiting"] == 0


def test_over_long_prompt_and_then_a_good_one(client):
    with pytest.raises(openai.BadRequestError, match="4096"):
        client.completions.create(model="tiny-gpt-oss", prompt="word " * 5000)
    assert client.completions.create(model="tiny-gpt-oss", prompt="a", max_tokens=1).usage.completion_tokens == 1


def copy_of_the_model(folder):
    folder.mkdir()
    for file in ASSETS.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.processes
def test_a_start_that_fails_says_so_in_one_line(tmp_path):
    """The same message came three times, once with the wrong flag before it. 2: another start would not help."""
    config = copy_of_the_model(tmp_path / "config")
    (config / "config.json").write_text('{"architectures": ["SomethingElse"]}')
    cut = copy_of_the_model(tmp_path / "cut")
    os.truncate(cut / "model.safetensors", 9_000_000)
    with ExitStack() as stack:
        processes = {
            folder: stack.enter_context(start_bundled(folder, "--model", str(folder), "--log-level", "warning"))
            for folder in (config, cut)
        }
        for folder, words in ((config, "config.json"), (cut, "truncated")):
            assert processes[folder].process.wait(60) == 2
            [line] = processes[folder].err.splitlines()
            assert line.startswith("moe-serve: the engine cannot start: ")
            assert words in line
