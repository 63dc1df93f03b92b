"""litellm against the real service, as the providers `openai` and `hosted_vllm`."""

import pytest

pytestmark = pytest.mark.clients


def test_chat_stream_and_tools(run_python):
    """G21: on the second turn litellm replays keys of its own inside the message."""
    for answers in run_python("ask_litellm.py").values():
        assert answers["content"] == answers["streamed"] == "The capital of France is Paris."
        assert answers["reasoning"]
        whole, streamed = answers["completion_tokens"]
        assert whole == streamed > 0
        assert answers["call"] == ["get_weather", {"city": "Paris"}]
        assert answers["after"] == "The result is 18."
