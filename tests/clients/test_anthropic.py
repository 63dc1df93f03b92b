"""Anthropic's Python client against the real service: messages, streams, and a call with its result."""

import pytest

from tests.clients.conftest import PARIS
from tests.server.conftest import WEATHER

MODEL = "tiny-gpt-oss"
FUNCTION = WEATHER["function"]
TOOL = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
ASK = {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(url):
    import anthropic  # takes a second, so only the process that runs this file imports it

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_whole_and_streamed(client):
    message = client.messages.create(**ASK, messages=[{"role": "user", "content": PARIS}])
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[1].text == "The capital of France is Paris."
    assert message.stop_reason == "end_turn"
    with client.messages.stream(**ASK, messages=[{"role": "user", "content": PARIS}]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[1].text == message.content[1].text
    assert final.usage.output_tokens == message.usage.output_tokens


def test_a_tool_call_and_the_turn_after_it(client):
    conversation = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.messages.create(**ASK, messages=conversation, tools=[TOOL])
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert (first.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"result": 18}'}
    conversation += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**ASK, messages=conversation, tools=[TOOL])
    assert second.stop_reason == "end_turn"
    assert "18" in second.content[-1].text
    counted = client.messages.count_tokens(model=MODEL, messages=conversation, tools=[TOOL])
    usage = second.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_mistake_is_told(client):
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="top_p"):
        client.messages.create(
            model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "Hi"}], extra_body={"top_p": 2}
        )
