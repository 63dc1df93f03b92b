"""/v1/completions over real HTTP: prompts of every form, echo and scores (B14), limits (B23), tokenizer routes."""

import pytest

from tests.server.conftest import MAX_MODEL_LEN, MODEL
from tests.tables import rows

PROMPT = "The capital of France is"


@pytest.fixture
def complete(service, harmony):
    """Ask the server; the engine answers with the text given."""
    with service.client() as client:

        def ask(text=" Paris.", **fields):
            service.engine.script = lambda _request: harmony(text)
            return client.completions.create(**{"model": MODEL, "prompt": PROMPT, **fields})

        yield ask


def test_answer(complete, harmony):
    answer = complete()
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
        "text_completion",
        " Paris.",
        "stop",
    )
    assert answer.usage.prompt_tokens == len(harmony(PROMPT))
    assert answer.usage.completion_tokens == len(harmony(" Paris."))


@rows("echo", False, True)
def test_streamed_answer_is_the_same(complete, echo):
    with complete(stream=True, echo=echo, logprobs=1) as stream:
        chunks = list(stream)
    whole = complete(echo=echo, logprobs=1).choices[0]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text == (PROMPT if echo else "") + " Paris."
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for part in parts for item in getattr(part, name)] == getattr(whole.logprobs, name)


def test_prompts_of_every_form_may_hold_control_tokens(complete, harmony, service):
    ids = harmony(PROMPT)
    for prompt in (PROMPT, ids, [PROMPT], [ids]):
        complete(prompt=prompt)
        assert service.engine.requests[-1].prompt_ids == ids
    answer = complete(prompt=[PROMPT, "Hello"], n=2, echo=True)
    assert [choice.text for choice in answer.choices] == [f"{PROMPT} Paris."] * 2 + ["Hello Paris."] * 2
    assert answer.usage.prompt_tokens == len(ids) + len(harmony("Hello"))
    complete(prompt="<|start|>user<|message|>Hi<|end|>")
    assert service.engine.requests[-1].prompt_ids == harmony("<|start|>user<|message|>Hi<|end|>")


@rows("as_ids", False, True)
@rows("max_tokens", 0, 1)
def test_echo_with_logprobs_scores_the_prompt_b14(complete, harmony, as_ids, max_tokens):
    text = "naïve 日本 text"
    ids = harmony(text)
    answer = complete(prompt=ids if as_ids else text, echo=True, logprobs=2, max_tokens=max_tokens)
    scores = answer.choices[0].logprobs
    generated = harmony(" Paris.")[:max_tokens]
    assert answer.usage.completion_tokens == max_tokens
    assert "".join(scores.tokens) == answer.choices[0].text
    assert answer.choices[0].text.startswith(text)
    assert {len(getattr(scores, name)) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {
        len(ids) + len(generated)
    }
    assert scores.token_logprobs == [None, *(-token_id / 1000 for token_id in [*ids[1:], *generated])]
    assert scores.top_logprobs[0] is None
    assert all(
        score in top.values() for score, top in zip(scores.token_logprobs[1:], scores.top_logprobs[1:], strict=True)
    )
    for token, offset in zip(scores.tokens, scores.text_offset, strict=True):
        assert answer.choices[0].text[offset : offset + len(token)] == token


def test_entries_of_the_chosen_token_and_of_the_end_b14(complete):
    scores = complete(logprobs=0).choices[0].logprobs
    assert [list(top.values()) for top in scores.top_logprobs] == [[score] for score in scores.token_logprobs]
    answer = complete(" Paris.<|return|>", logprobs=1, max_tokens=50).choices[0]
    assert answer.text == " Paris."
    assert answer.logprobs.tokens[-1] == ""
    assert len(answer.logprobs.tokens) == len(answer.logprobs.token_logprobs)


def test_control_tokens_are_shown_on_request(complete):
    answer = complete(" Paris.<|return|>", extra_body={"skip_special_tokens": False})
    assert answer.choices[0].text == " Paris.<|return|>"


@rows("fields, expected", ({}, 16), ({"extra_body": {"max_completion_tokens": 50}}, 50), ({"max_tokens": 3}, 3))
def test_limits_b23(complete, fields, expected):
    answer = complete(" word" * 100, **fields)
    assert answer.usage.completion_tokens == expected
    assert answer.choices[0].finish_reason == "length"


def test_the_default_limit_is_what_the_context_leaves_if_that_is_less(complete):
    assert complete(" word" * 100, prompt=[5] * (MAX_MODEL_LEN - 6)).usage.completion_tokens == 6


def test_stop_string(complete):
    answer = complete(" one two three", stop=[" two"], max_tokens=50)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" one", "stop")


def test_usage_of_a_stream(complete):
    with complete(stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == complete().usage


def test_tokenize_and_back(service, harmony):
    with service.http() as http:
        answer = http.post("/tokenize", json={"prompt": PROMPT}).json()
        assert answer["tokens"] == harmony(PROMPT)
        assert answer["count"] == len(answer["tokens"])
        assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": PROMPT}
        rendered = http.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()["tokens"]
        assert (
            "<|start|>user<|message|>Hi<|end|>" in http.post("/detokenize", json={"tokens": rendered}).json()["prompt"]
        )
