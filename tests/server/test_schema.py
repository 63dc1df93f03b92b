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


@pytest.mark.timeout(300)
@rows("operation", *OPERATIONS)
def test_no_request_causes_a_server_error(operation):
    statuses = set()

    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data):
        case = data.draw(operation.as_strategy())
        response = case.call()
        assert response.status_code < 500 or response.json().get("error", {}).get("code") == "deadline_exceeded"
        case.validate_response(response, checks=CHECKS)
        statuses.add(response.status_code)

    run()
    assert statuses


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
