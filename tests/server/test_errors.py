"""Bad input over real HTTP: always the OpenAI error body, the right status, the field named, nothing else disturbed."""

import gzip
import json
import socket

import openai
import pytest

from server.schema.limits import MAX_NESTING
from tests.server.conftest import ANSWER, MAX_MODEL_LEN, MAX_REQUESTS, MODEL, WEATHER, FakeEngine, serve
from tests.tables import rows

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
def post(service, harmony):
    service.engine.script = lambda _request: harmony(ANSWER)
    with service.http() as http:

        def ask(body, path="/v1/chat/completions", **options):
            return http.post(path, **({"json": body} if isinstance(body, dict) else {"content": body}), **options)

        yield ask
        assert ask({"messages": [USER]}).status_code == 200, "the next good request must still work"
        assert not service.engine.running


def error_of(response, status=400):
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


CHAT_ERRORS = [
    ({}, "messages", "missing"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": {"role": "user"}}, "messages", "list"),
    ({"messages": "Hi"}, "messages", "list"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role", "'system', 'developer'"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "needs content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        "image_url",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content", "part 0"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "tool_call_id"),
    (
        {"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "c9"}]},
        "messages[1].tool_call_id",
        "no ass",
    ),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0]", "neither"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call", "None"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 10**12}, "max_tokens", str(MAX_MODEL_LEN)),
    ({"max_tokens": 1.5}, "max_tokens", "integer"),
    ({"max_tokens": "5"}, "max_tokens", "integer"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 10**6}, "n", "less than or equal to"),
    ({"n": MAX_REQUESTS + 1}, "n", f"at most {MAX_REQUESTS} at once"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"seed": 2**63}, "seed", str(2**63 - 1)),
    ({"seed": 2**70}, "seed", f"between {-(2**63)} and {2**63 - 1}"),
    ({"seed": -(2**64)}, "seed", f"between {-(2**63)} and {2**63 - 1}"),
    ({"seed": 1.5}, "seed", "valid integer"),
    ({"max_tokens": 10**30}, "max_tokens", str(2**63 - 1)),
    ({"stop_token_ids": [2**70]}, "stop_token_ids[0]", str(2**63 - 1)),
    ({"temperature": -0.7}, "temperature", "greater than or equal to 0"),
    ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"stop": [""]}, "stop", "between 1 and"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": 5}, "stop", "string"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "ids 0 to 4095"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "between -100 and 100"),
    ({"stop_token_ids": [4096]}, "stop_token_ids", "ids 0 to 4095"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "5"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"stream": True, "stream_options": {"often": True}}, "stream_options.often", "unknown"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "same name"),
    ({"tools": [{"type": "browser"}]}, "tools[0].type", "function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
    ({"functions": []}, "functions", "unknown"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "low, medium or high"),
    ({"colour": "red"}, "colour", "unknown"),
    ({"modalities": ["audio"]}, "modalities[0]", "text"),
]


@rows("fields, param, words", *CHAT_ERRORS)
def test_chat_errors_name_the_field_b20(post, fields, param, words):
    body = {"model": MODEL, **fields} if "messages" in fields or not fields else {"messages": [USER], **fields}
    error = error_of(post(body))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]
    assert post({"messages": [USER]}).status_code == 200, "the next good request must still work"


COMPLETION_ERRORS = [
    ({}, "prompt", "missing"),
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": ""}, "prompt", "at least one token"),
    ({"prompt": []}, "prompt", "between 1"),
    ({"prompt": [[]]}, "prompt", "list"),
    ({"prompt": [1, -5]}, "prompt", "negative"),
    ({"prompt": [True]}, "prompt", "list"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    ({"prompt": "a", "best_of": 3}, "best_of", "not supported"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "20"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"prompt": ["a"] * 100, "n": 2}, "n", "must not exceed"),
]


@rows("body, param, words", *COMPLETION_ERRORS)
def test_completion_errors_name_the_field(post, body, param, words):
    error = error_of(post(body, "/v1/completions"))
    assert error["param"] == param
    assert words in error["message"]


@rows(
    "path, body",
    ("/v1/chat/completions", {"messages": [USER]}),
    ("/v1/completions", {"prompt": "a"}),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [1]}),
)
def test_an_unknown_parameter_that_is_null_is_ignored_and_any_other_is_not(post, path, body):
    """Some clients send every field they have, null where it was not set."""
    nulls = {"audio": None, "functions": None, "colour": None}
    assert post({**body, **nulls}, path).status_code == 200
    for value in (False, 0, "", [], {}):
        assert error_of(post({**body, **nulls, "size": value}, path))["param"] == "size"


@rows(
    "body", b"", b"{", b"[1]", b'"x"', b"null", b'{"messages": NaN}', b'{"a": "\\ud800"}', b"\xff\xfe", b"[" * 100_000
)
def test_malformed_json(post, body):
    error = error_of(post(body))
    assert error["code"] == "invalid_json"


def with_lists(body, depth):
    """The JSON of a body, with so many lists inside each other in the place of DEEP."""
    lists = "[" * depth + "]" * depth
    return json.dumps(body).replace('"DEEP"', lists).replace("DEEP", lists).encode()


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"default": "DEEP"}}}
CALL_WITH = {**CALL, "function": {"name": "f", "arguments": {"a": "DEEP"}}}
TOO_DEEP = [
    ("chat/completions", {"tools": [FUNCTION]}, "tools"),
    ("chat/completions", {"chat_template_kwargs": {"model_identity": "DEEP"}}, "chat_template_kwargs"),
    ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALL_WITH]}]}, "messages"),
    ("chat/completions", {"metadata": "DEEP"}, "metadata"),
    ("chat/completions", {"structured_outputs": {"json": {"const": "DEEP"}}}, "structured_outputs"),
    ("chat/completions", {"structured_outputs": {"json": '{"const": DEEP}'}}, "structured_outputs.json"),
    ("responses", {"input": [{**USER, "foo": "DEEP"}]}, "input"),
    ("responses", {"tools": [{"type": "function", "name": "f", "foo": "DEEP"}]}, "tools"),
    ("responses", {"tool_choice": {"type": "allowed_tools", "tools": [{"foo": "DEEP"}]}}, "tool_choice"),
    ("completions", {"metadata": "DEEP"}, "metadata"),
]


@rows("depth", MAX_NESTING + 1, 990)
@rows("path, fields, param", *TOO_DEEP)
def test_deep_nesting_is_refused_by_the_fields_name(post, path, fields, param, depth):
    needed = {"completions": {"prompt": "Hi"}, "responses": {"input": "Hi"}}.get(path, {"messages": [USER]})
    error = error_of(post(with_lists({**needed, **fields}, depth), f"/v1/{path}"))
    assert (error["param"], f"nested more than {MAX_NESTING} deep" in error["message"]) == (param, True)


def test_what_is_nested_as_deep_as_allowed_is_answered_and_stored(tokenizer, tmp_path):
    """An answer of /v1/responses repeats the tools, and the store keeps the input."""
    body = {
        "input": [{**USER, "foo": "DEEP"}],
        "tools": [{"type": "function", "name": "f", "foo": "DEEP"}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    }
    engine = FakeEngine(script=lambda _request: tokenizer.encode(ANSWER))
    with serve(engine, tokenizer, response_store=tmp_path / "f") as service, service.http() as http:
        for stream in (False, True):
            answer = http.post("/v1/responses", content=with_lists({**body, "stream": stream}, MAX_NESTING - 2))
            assert answer.status_code == 200, answer.text
            assert '"store":true' in answer.text
            assert "response.failed" not in answer.text


def test_detokenize_knows_its_ids(post):
    assert error_of(post({"tokens": [5, 4096]}, "/detokenize"))["param"] == "tokens"


@rows("field", "prompt", "messages")
def test_tokenize_refuses_only_what_has_surely_more_than_four_contexts(post, field):
    """By its bytes: no limit is reached by short tokens alone."""

    def ask(text):
        return post({field: text if field == "prompt" else [USER | {"content": text}]}, "/tokenize")

    assert ask("a " * 5 * MAX_MODEL_LEN).json()["count"] > 5 * MAX_MODEL_LEN
    error = error_of(ask("a " * 100 * MAX_MODEL_LEN))
    assert error["code"] == "context_length_exceeded"
    assert f"more than {4 * MAX_MODEL_LEN} tokens, 4 times this model's maximum context length" in error["message"]


def test_counting_of_messages_ends_at_four_contexts(post):
    def count(num_words):
        body = {"model": MODEL, "messages": [USER | {"content": " a" * num_words}]}
        return post(body, "/v1/messages/count_tokens").json()

    beside = count(1)["input_tokens"] - 1
    assert count(4 * MAX_MODEL_LEN - beside) == {"input_tokens": 4 * MAX_MODEL_LEN}
    message = count(4 * MAX_MODEL_LEN - beside + 1)["error"]["message"]
    assert f"more than {4 * MAX_MODEL_LEN} tokens, 4 times this model's maximum" in message


def test_content_type_and_an_identity_coding_do_not_matter(post):
    response = post(b'{"messages": [{"role": "user", "content": "Hi"}]}', headers={"content-type": "text/plain"})
    assert response.status_code == 200
    assert post({"messages": [USER]}, headers={"content-encoding": "Identity"}).status_code == 200


def test_what_exceeds_the_context_names_both_numbers_b20(post):
    error = error_of(post({"messages": [{"role": "user", "content": "word " * 9000}]}))
    assert error["code"] == "context_length_exceeded"
    assert str(MAX_MODEL_LEN) in error["message"]
    assert "maximum context length" in error["message"]
    error = error_of(post({"prompt": [5] * MAX_MODEL_LEN}, "/v1/completions"))
    assert (error["code"], f"{MAX_MODEL_LEN} tokens" in error["message"]) == ("context_length_exceeded", True)
    error = error_of(post({"prompt": [5] * 100, "max_tokens": MAX_MODEL_LEN}, "/v1/completions"))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "100 tokens" in error["message"]
    assert str(MAX_MODEL_LEN) in error["message"]


@rows("path", "/v1/chat/completions", "/v1/completions", "/tokenize")
def test_unknown_model(post, path):
    body = {"model": "gpt-9", "messages": [USER]} if "chat" in path else {"model": "gpt-9", "prompt": "a"}
    error = error_of(post(body, path), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert MODEL in error["message"]


def test_official_client_raises_its_own_errors_b20(service):
    with service.client() as client:
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt-9", messages=[USER])
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt=[5] * MAX_MODEL_LEN)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=[USER], temperature=-0.7)
        assert caught.value.param == "temperature"


@rows("path", "/v1", "/v1/chat", "//v1/models", "/V1/models", "/docs")
def test_unknown_paths(service, path):
    with service.http() as http:
        error_of(http.get(service.url + path), 404)


def test_wrong_method(service):
    with service.http() as http:
        response = http.get("/v1/chat/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_large_body_is_refused_without_being_read(service):
    """The answer comes while the client has sent no byte of the 10 MB it announced."""
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 10000000\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")


def test_large_body_of_unknown_length_is_refused_at_the_limit(post):
    spaces = (b" " * 65536 for _ in range(10_000_000 // 65536))
    error = error_of(post({"messages": [USER], "user": "x" * 10_000_000}), 413)
    assert error["code"] == "request_too_large"
    assert "4194304" in error["message"]
    error_of(post(spaces), 413)


def test_several_names(tokenizer, service):
    with serve(service.engine, tokenizer, served_model_name=("one", "org/two")) as named, named.client() as client:
        assert [model.id for model in client.models.list()] == ["one", "org/two"]
        assert client.models.retrieve("org/two").id == "org/two"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("three")


@rows("coding", "gzip", "br", "x" * 100)
def test_a_compressed_body_is_refused_by_its_coding(post, coding):
    error = error_of(post(gzip.compress(b'{"messages": []}'), headers={"content-encoding": coding}))
    assert error["code"] == "unsupported_content_encoding"
    assert coding[:64] in error["message"]


@rows(
    "body, words",
    (b'{"messages": "\xe9"}', "byte 14 is not UTF-8"),
    ('{"messages": "Hi"}'.encode("utf-16"), "byte 0 is not UTF-8"),
    (b'{"messages": "\\ud800"}', "no low surrogate in string at character"),
)
def test_a_body_that_is_not_utf_8_is_called_so(post, body, words):
    assert words in error_of(post(body))["message"]
