"""curl against the real service, as the README, a container's health check and people use it."""

import json

import pytest

from tests.clients.conftest import PARIS, program

CHAT = {"messages": [{"role": "user", "content": PARIS}]}


@pytest.fixture
def curl(run, url):
    """Run curl on a path; a status of 400 and above fails the test."""

    def get(path, *options, body=None):
        posted = () if body is None else ("-H", "Content-Type: application/json", "-d", json.dumps(body))
        command = program("curl", "install it, for example with apt-get install curl")
        return run(command, "-sS", "--fail-with-body", "--max-time", "60", *options, *posted, url + path)

    return get


def test_chat(curl):
    answer = json.loads(curl("/v1/chat/completions", body=CHAT))
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."


def test_stream(curl):
    events = curl("/v1/chat/completions", "-N", body=CHAT | {"stream": True}).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-2]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "The capital of France is Paris."


def test_a_body_without_a_content_type_of_its_own(curl):
    """`-d` alone says application/x-www-form-urlencoded."""
    answer = json.loads(curl("/v1/completions", "-d", json.dumps({"prompt": "The capital of France is"})))
    assert answer["object"] == "text_completion"


def test_models(curl):
    assert json.loads(curl("/v1/models"))["data"][0]["id"] == "tiny-gpt-oss"


def test_an_offer_of_http_2_changes_nothing(curl):
    """G01: the offer used to cost the body."""
    answer = json.loads(curl("/v1/chat/completions", "--http2", body=CHAT))
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."


def test_head(curl):
    """G05"""
    assert curl("/health", "--head").startswith("HTTP/1.1 200")
