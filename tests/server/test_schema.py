"""Requests made up from the service's own OpenAPI document: every answer is one that the document describes (G86)."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from loaders.tokenizer import load_tokenizer
from server.app import create_app
from server.config import ServerConfig
from server.keys import ADMIN_PATHS, OPEN_PATHS, ORDER_PATHS
from tests.server.conftest import ANSWER, ASSETS, CALL, WEATHER, FakeEngine
from tests.tables import rows

CHECKS = [
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]
TOKENIZER = load_tokenizer(ASSETS)
ENGINE = FakeEngine(script=lambda _request: TOKENIZER.encode("<|channel|>final<|message|>Hi.<|return|>"))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", create_app(ENGINE, TOKENIZER, ServerConfig()))
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]


KEYED = schemathesis.openapi.from_asgi(
    "/openapi.json", create_app(ENGINE, TOKENIZER, ServerConfig(api_key="one", admin_key="root")),
    headers={"Authorization": "Bearer root"},
)  # fmt: skip
KEYED_OPERATIONS = [found.ok() for found in KEYED.get_all_operations()]


def try_out(operation, num_examples, check, keys):
    """Call the operation with made-up bodies and headers, each time with one of the keys; `check` gets key and answer.

    Every answer must be one that the document describes.
    """
    statuses = set()

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data):
        case = data.draw(operation.as_strategy())
        key = data.draw(st.sampled_from(keys))
        response = case.call(headers={} if key is None else {"Authorization": f"Bearer {key}"})
        case.validate_response(response, checks=CHECKS)
        check(key, response)
        statuses.add(response.status_code)

    run()
    assert statuses


def is_no_fault(response):
    """Whether the service is not to blame: a deadline that nothing could meet is the client's own."""
    return response.status_code < 500 or response.status_code == 504


@pytest.mark.timeout(300)
@rows("operation", *OPERATIONS)
def test_no_request_causes_a_server_error(operation):
    def check(_key, response):
        assert is_no_fault(response), response.text

    try_out(operation, 15, check, [None])


@pytest.mark.timeout(300)
@rows("operation", *KEYED_OPERATIONS)
def test_no_request_causes_a_server_error_where_keys_are_needed(operation):
    is_open = operation.path in OPEN_PATHS
    is_for_admin = operation.path in ADMIN_PATHS | ORDER_PATHS

    def check(key, response):
        assert is_no_fault(response), response.text
        if is_open:
            assert response.status_code not in (401, 403)
        else:
            assert (response.status_code == 401) == (key in (None, "wrong"))
            assert (response.status_code == 403) == (key == "one" and is_for_admin)

    try_out(operation, 6, check, [None, "wrong", "one", "root"])


def test_every_operation_describes_its_answers_errors_and_streams_g86():
    for operation in OPERATIONS:
        responses = operation.definition.raw["responses"]
        assert "422" not in responses
        assert {"200", "500"} <= set(responses)
        for status, response in responses.items():
            for media_type, content in response["content"].items():
                assert content["schema"], (operation.label, status, media_type)
                is_error = status != "200" and not operation.path.startswith("/health")
                name = "AnthropicErrorBody" if operation.path.startswith("/v1/messages") else "ErrorBody"
                assert not is_error or content["schema"] == {"$ref": f"#/components/schemas/{name}"}
    for path in ("/v1/chat/completions", "/v1/completions"):
        responses = SCHEMA[path]["POST"].definition.raw["responses"]
        assert set(responses) == {"200", "400", "401", "404", "408", "413", "429", "499", "500", "503", "504"}
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}


def call(path, body):
    operation = SCHEMA[path]["POST"]
    case = operation.Case(body=body, media_type="application/json")
    response = case.call()
    case.validate_response(response, checks=CHECKS)
    return response.status_code


USER = {"messages": [{"role": "user", "content": "Hi"}]}


@rows("stream", False, True)
def test_answers_of_every_kind_are_as_described_g86(stream, monkeypatch):
    """Made-up requests rarely get as far as tool calls or log-probabilities."""
    for answer in (ANSWER, CALL):
        monkeypatch.setattr(ENGINE, "script", lambda _request, answer=answer: TOKENIZER.encode(answer))
        fields = {**USER, "tools": [WEATHER], "logprobs": True, "top_logprobs": 2, "n": 2, "stream": stream}
        assert call("/v1/chat/completions", fields) == 200
        ids = {"return_token_ids": True, "stream": stream}
        assert call("/v1/completions", {"prompt": "a", "logprobs": 2, "echo": True, **ids}) == 200
        assert call("/v1/chat/completions", {**USER, **ids}) == 200
        tools = [{"name": "get_weather", "input_schema": {}}]
        assert call("/v1/messages", {**USER, "max_tokens": 99, "tools": tools, "stream": stream}) == 200
    assert call("/v1/completions", {"prompt": "a", "prompt_logprobs": 2}) == 200


@rows("state, status", ({"ready": False}, 503), ({"script": lambda _request: 1 / 0}, 500), ({"failure": "gone"}, 503))
def test_failures_are_as_described_g86(monkeypatch, state, status):
    for name, value in state.items():
        monkeypatch.setattr(ENGINE, name, value)
    assert call("/v1/chat/completions", USER) == status
    assert call("/v1/completions", {"prompt": "a", "stream": True}) == status


def test_the_key_is_described_where_one_is_needed_g86():
    document = create_app(ENGINE, TOKENIZER, ServerConfig(api_key="k")).openapi()
    assert document["components"]["securitySchemes"] == {
        "key": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    assert document["security"] == [{"key": []}, {"header": []}]
    no_key = {path for path, operations in document["paths"].items() if operations.get("get", {}).get("security") == []}
    assert no_key == {"/health", "/health/live", "/health/ready"}
    assert "security" not in create_app(ENGINE, TOKENIZER, ServerConfig()).openapi()
