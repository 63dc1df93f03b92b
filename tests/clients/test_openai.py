"""The official Python client against the real service: chat, the stream helper, completions, tools, models."""

import json

import openai
import pytest

from tests.clients.conftest import PARIS
from tests.server.conftest import WEATHER

MODEL = "tiny-gpt-oss"
QUESTION = {"role": "user", "content": PARIS}


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=[QUESTION])
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_helper(client):
    with client.chat.completions.stream(
        model=MODEL, messages=[QUESTION], stream_options={"include_usage": True}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == "The capital of France is Paris."
    assert len(deltas) > 1
    assert final.usage.completion_tokens > len(deltas)


def test_stream_with_usage_in_every_chunk(client):
    """What guidellm asks for; the client's own models take it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    with client.chat.completions.create(
        model=MODEL, messages=[QUESTION], stream=True, stream_options=options
    ) as stream:
        counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] > counts[0] > 0


def test_completion(client):
    answer = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert answer.choices[0].text.startswith(" Paris")


def test_a_tool_call_and_the_turn_after_it(client):
    """The message goes back as the client holds it, with every field that the service put into it."""
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER]).choices[0]
    [call] = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"result": 18}'}
    second = client.chat.completions.create(model=MODEL, messages=[*messages, first.message, result], tools=[WEATHER])
    assert second.choices[0].message.content == "The result is 18."


def test_models(client):
    [model] = client.models.list()
    assert model.id == client.models.retrieve(model.id).id == MODEL


def test_a_wrong_model_name(client):
    with pytest.raises(openai.NotFoundError, match=r"'gpt-4o' is not served here: known is tiny-gpt-oss"):
        client.chat.completions.create(model="gpt-4o", messages=[QUESTION])
