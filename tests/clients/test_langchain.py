"""langchain-openai against the real service: invoke, stream, bind_tools, completions."""

import pytest

pytestmark = pytest.mark.clients


def test_invoke_stream_and_bind_tools(run_python):
    answers = run_python("ask_langchain.py")
    assert answers["content"] == answers["streamed"] == "The capital of France is Paris."
    whole, streamed = answers["output_tokens"]
    assert whole == streamed > 0
    assert answers["call"] == ["get_weather", {"city": "Paris"}]
    assert answers["after"] == "The result is 18."
    assert answers["completion"].startswith(" Paris")
