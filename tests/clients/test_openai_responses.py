"""The official Python client's `responses` against the real service: answers, streams, and a call with its result."""

import json

import openai
import pytest

from tests.clients.conftest import PARIS
from tests.server.conftest import WEATHER

MODEL = "tiny-gpt-oss"
TOOL = {"type": "function", "strict": None, **WEATHER["function"]}


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_whole_and_streamed(client):
    answer = client.responses.create(model=MODEL, input=PARIS, temperature=0)
    assert answer.output_text == "The capital of France is Paris."
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    with client.responses.stream(model=MODEL, input=PARIS, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == answer.output_text
    assert (final.status, final.usage.output_tokens) == ("completed", answer.usage.output_tokens)


def test_a_tool_call_and_the_turn_after_it(client):
    """The items go back as the client holds them."""
    conversation = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.responses.create(model=MODEL, input=conversation, tools=[TOOL], temperature=0)
    [call] = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"result": 18}'}
    second = client.responses.create(
        model=MODEL, input=[*conversation, *first.output, result], tools=[TOOL], temperature=0
    )
    assert second.status == "completed"
    assert "18" in second.output_text


def test_a_mistake_is_named(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input=PARIS, background=True)
    assert refused.value.param == "background"
