"""Requests as popular clients send them, in the versions named here, and what they read of the answers.

All were recorded but those of Open WebUI, which are what its source builds.
"""

import json

import pytest

from tests.server.conftest import ANSWER, CALL, MODEL, WEATHER
from tests.tables import rows

QUESTION = {"role": "user", "content": "What is the capital of France?"}
BOTH_USAGES = {"include_usage": True, "continuous_usage_stats": True}

SCORED = {"max_tokens": 64, "temperature": 0, "stop": ["\n\n"], "seed": 1234}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
WEATHER_QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


def after_call(call_id, **turn):
    """A conversation whose last turns are a call and its result."""
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    call = {"id": call_id, "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": call_id, "content": "18 degrees and sunny"}
    return {"messages": [WEATHER_QUESTION, {"role": "assistant", "tool_calls": [call], **turn}, result]}


CHATS = {
    "guidellm 0.8.1": {
        "stream": True,
        "stream_options": BOTH_USAGES,
        "max_completion_tokens": 64,
        "stop": None,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}],
    },
    "lm-eval 0.4.13": {"messages": [QUESTION], **SCORED},
    "lm-eval before 0.4.13 (G20)": {"messages": [{**QUESTION, "type": "text"}], **SCORED},
    "Open WebUI 0.12.4, a turn with tools": {
        **STREAMED,
        "messages": [{"role": "system", "content": "Be brief."}, QUESTION],
        "tools": [WEATHER],
        **{"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 42, "stop": ["\u0007"]},
        **{"max_tokens": 64, "reasoning_effort": "low"},
    },
    "Open WebUI 0.12.4, the title of a chat": {
        "stream": False,
        "messages": [
            {"role": "user", "content": "### Task:\nGenerate a concise title.\n<chat_history>\n</chat_history>"}
        ],
        "max_tokens": 1000,
    },
    "Open WebUI 0.12.4, an earlier turn without text": {
        "stream": False,
        "messages": [QUESTION, {"role": "assistant", "content": ""}, QUESTION],
    },
    "litellm 1.110.2": {"messages": [QUESTION], **STREAMED},
    "litellm 1.110.2, the turn after a call (G21)": {
        **after_call(
            "call_687f9d953a49450586917e5c",
            reasoning_content="I call get_weather.",
            provider_specific_fields={"reasoning": "I call get_weather."},
        ),
        "tools": [WEATHER],
    },
    "Open WebUI 0.12.4, the turn after a call (G21)": {
        **STREAMED,
        **after_call(
            "call_1",
            content="",
            reasoning_content="I call get_weather.",
            reasoning_details=[{"type": "reasoning.text", "text": "I call get_weather."}],
        ),
        "tools": [WEATHER],
    },
    "langchain-openai 1.7.4": {
        "stream": False,
        **after_call("call_09a9bba6d4f54f93ba21ba25", content=None),
        "tools": [WEATHER],
    },
}
COMPLETIONS = {
    "guidellm 0.8.1": {
        "stream": True,
        "stream_options": BOTH_USAGES,
        **{"max_tokens": 16, "stop": None, "ignore_eos": True, "prompt": "The capital of France is"},
    },
    "lm-eval 0.4.13, generate_until": {
        **SCORED,
        "prompt": [[10, 20, 30], [40, 50]],
        "stop": ["\n\n", "<|return|>"],
    },
    "langchain-openai 1.7.4": {
        "prompt": ["The capital of France is"],
        **{"frequency_penalty": 0, "presence_penalty": 0, "logprobs": None, "max_tokens": 5, "n": 1, "seed": None},
        **{"temperature": 0.7, "top_p": 1},
    },
}


@pytest.fixture
def send(service):
    """POST a body; returns the answer, or the chunks of a streamed one."""
    with service.http() as http:

        def post(path, **body):
            response = http.post(path, json={"model": MODEL, **body})
            assert response.status_code == 200, response.text
            return chunks_of(response.text) if body.get("stream") else response.json()

        yield post


def chunks_of(text):
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


@rows("client, body", *CHATS.items())
def test_chat_of(service, harmony, send, client, body):
    service.engine.script = lambda _request: harmony(ANSWER)
    answer = send("/v1/chat/completions", **body)
    if isinstance(answer, list):
        deltas = [choice["delta"] for chunk in answer for choice in chunk["choices"]]
        text = "".join(delta.get("content") or "" for delta in deltas)
        assert answer[-1]["usage"]["completion_tokens"] == len(harmony(ANSWER))
    else:
        text = answer["choices"][0]["message"]["content"]
    assert text == "The capital of France is Paris."


@rows("client", *COMPLETIONS)
def test_completion_of(client, service, harmony, send):
    service.engine.script = lambda _request: harmony(" Paris.")
    answer = send("/v1/completions", **COMPLETIONS[client])
    chunks = answer if isinstance(answer, list) else [answer]
    num_prompts = len(COMPLETIONS[client]["prompt"]) if isinstance(COMPLETIONS[client]["prompt"], list) else 1
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == " Paris." * num_prompts


@rows("options", BOTH_USAGES, {"continuous_usage_stats": True}, {"include_usage": True}, {})
def test_continuous_usage_counts_up_chunk_by_chunk(options, service, harmony, send):
    """guidellm (field reports, F) reads token counts from each chunk, as vLLM and SGLang give them."""
    service.engine.script = lambda _request: harmony(ANSWER)
    chunks = send("/v1/chat/completions", messages=[QUESTION], stream=True, stream_options=options)
    with_choices = [chunk for chunk in chunks if chunk["choices"]]
    assert len(chunks) - len(with_choices) == ("include_usage" in options)
    assert all(("usage" in chunk) == ("continuous_usage_stats" in options) for chunk in with_choices)
    usages = [chunk["usage"] for chunk in chunks if "usage" in chunk]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    if usages:
        assert counts[-1] == len(harmony(ANSWER))
        assert len({usage["prompt_tokens"] for usage in usages}) == 1
    if options == BOTH_USAGES:
        assert usages[-1] == usages[-2]
        assert len(set(counts)) > 5


def test_continuous_usage_is_that_of_the_chunk_s_choice(service, harmony, send):
    """With several prompts or choices a chunk counts its own; the last chunk counts all."""
    service.engine.script = lambda request: harmony(" Paris." if len(request.prompt_ids) == 3 else " Paris, France.")
    body = {"prompt": [[10, 20, 30], [40, 50]], "n": 2, "stream": True, "stream_options": BOTH_USAGES}
    *chunks, total = send("/v1/completions", **body)
    last = {chunk["choices"][0]["index"]: chunk["usage"] for chunk in chunks}
    num_short, num_long = len(harmony(" Paris.")), len(harmony(" Paris, France."))
    assert [last[index]["prompt_tokens"] for index in range(4)] == [3, 3, 2, 2]
    assert [last[index]["completion_tokens"] for index in range(4)] == [num_short] * 2 + [num_long] * 2
    assert (total["usage"]["prompt_tokens"], total["usage"]["completion_tokens"]) == (5, 2 * (num_short + num_long))


def test_continuous_usage_of_a_tool_call(service, harmony, send):
    service.engine.script = lambda _request: harmony(CALL)
    body = {"messages": [QUESTION], "tools": [WEATHER], "stream": True, "stream_options": BOTH_USAGES}
    *chunks, total = send("/v1/chat/completions", **body)
    assert all(chunk["usage"]["prompt_tokens"] == total["usage"]["prompt_tokens"] for chunk in chunks)
    assert chunks[-1]["usage"] == total["usage"]


def test_scores_of_lm_eval_line_up_with_the_tokens(service, harmony, send):
    """It takes `[len(context):-1]`: one entry a prompt token, then exactly one for the token generated.

    That one must be there even if it ends the text and shows nothing, else the last answer token is cut off.
    """
    for generated in (" the", "<|return|>"):
        [token] = ids = harmony(generated)
        service.engine.script = lambda _request, ids=ids: ids
        body = {"prompt": [[100, 200, 300], [400, 500]], "temperature": 0, "max_tokens": 1, "seed": 1234}
        answer = send("/v1/completions", **body, logprobs=1, echo=True)
        scores = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
        assert scores == [[None, -0.2, -0.3, -token / 1000], [None, -0.5, -token / 1000]]
        tops = [choice["logprobs"]["top_logprobs"] for choice in answer["choices"]]
        assert list(map(len, tops)) == list(map(len, scores))


def test_lm_eval_needs_no_tokenizer_files(service, harmony, send):
    """Its remote tokenizer: /tokenizer_info, then /tokenize and /detokenize as vLLM has them."""
    with service.http() as http:
        info = http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<|startoftext|>", "<|return|>")
    assert "{%" in info["chat_template"]
    for text in ("test", info["eos_token"], " Paris"):
        tokens = send("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
        assert tokens == harmony(text)
        assert send("/detokenize", tokens=tokens)["prompt"] == text


def test_a_bare_prompt_has_no_first_token_of_its_own(service, harmony, send, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "adds_bos", True)
    bare = harmony("test")
    assert send("/tokenize", prompt="test", add_special_tokens=False)["tokens"] == bare
    for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": None}):
        assert send("/tokenize", prompt="test", **fields)["tokens"] == [*harmony("<|startoftext|>"), *bare]
    rendered = send("/tokenize", messages=[QUESTION], add_special_tokens=False)["tokens"]
    assert rendered == send("/tokenize", messages=[QUESTION])["tokens"]
    with service.http() as http:
        refused = http.post("/tokenize", json={"messages": [QUESTION], "add_special_tokens": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "add_special_tokens")


@rows(
    "path, advice",
    ("/chat/completions", ": did you mean /v1/chat/completions?"),  # a base URL without /v1
    ("/completions", ": did you mean /v1/completions?"),
    ("/v1/v1/chat/completions", ": did you mean /v1/chat/completions?"),  # one with /v1 where none is wanted
    ("/v1/chat/completions/", ": did you mean /v1/chat/completions?"),
    ("/v1/tokenize", ": did you mean /tokenize?"),
    ("/v1/embeddings", ""),
    ("/v2", ""),
)
def test_a_wrong_base_url_is_answered_with_the_right_path(service, path, advice):
    with service.http() as http:
        response = http.post(path, json={"messages": [QUESTION]})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == f"there is no {path} here{advice}"


def test_models_with_a_slash_at_the_end(service):
    with service.http() as http:
        assert http.get("/v1/models/").json() == http.get("/v1/models").json()


@rows("method", "GET", "HEAD")
def test_what_clients_ask_before_they_begin(method, service):
    """guidellm asks /health (G05), Open WebUI and curl's users /v1/models."""
    with service.http() as http:
        statuses = [http.request(method, path).status_code for path in ("/health", "/v1/models", f"/v1/models/{MODEL}")]
    assert statuses == [200, 200, 200]
