"""The JDK's HttpClient (Spring AI and LangChain4j build on it), a program of one file run by `java`."""

import json

import pytest

from tests.clients.conftest import HERE, program

pytestmark = pytest.mark.clients


def test_chat_and_stream(run, url):
    """G01: with its default settings it asks for an upgrade to HTTP/2 in every request."""
    java = program("java", "install a JDK of version 17 or newer, for example openjdk-17-jdk-headless")
    whole, *events = run(java, HERE / "Chat.java", url).splitlines()
    assert json.loads(whole)["choices"][0]["message"]["content"] == "The capital of France is Paris."
    chunks = [event.removeprefix("data: ") for event in events if event]
    assert chunks[-1] == "[DONE]"
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "The capital of France is Paris."
