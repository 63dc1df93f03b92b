"""Anthropic's Messages API: efforts, and thinking that is not displayed."""

import pytest

from tests.server.conftest import ANSWER, MODEL
from tests.server.test_anthropic import TOOL, TWO_CALLS, USER, client_of, plain
from tests.tables import rows

LONG = f"<|channel|>analysis<|message|>{'word ' * 200}<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>"
HIDDEN = {"type": "adaptive", "display": "omitted"}


@pytest.fixture
def client(service, harmony):
    service.engine.script = lambda _request: harmony(ANSWER)
    with client_of(service) as client:
        yield client


def fields_of(**fields):
    return {"model": MODEL, "max_tokens": 500, "messages": USER, **fields}


@rows("effort, in_prompt", ("low", "low"), ("medium", "medium"), ("high", "high"), ("xhigh", "high"), ("max", "high"))
def test_efforts_beyond_high_are_high(effort, in_prompt, client, service, tokenizer):
    client.messages.create(**fields_of(output_config={"effort": effort}))
    assert f"Reasoning: {in_prompt}" in tokenizer.decode(service.engine.requests[-1].prompt_ids)


@rows("transcript", ANSWER, TWO_CALLS, LONG)
def test_omitted_thinking_is_an_empty_block_in_whole_and_streamed_messages(transcript, client, service, harmony):
    service.engine.script = lambda _request: harmony(transcript)
    fields = fields_of(thinking=HIDDEN, tools=[TOOL])
    whole = client.messages.create(**fields)
    thinking = whole.content[0]
    assert (thinking.type, thinking.thinking, bool(thinking.signature)) == ("thinking", "", True)
    assert whole.usage.output_tokens_details.thinking_tokens > 0
    with client.messages.stream(**fields) as stream:
        assert "thinking" not in [event.type for event in stream]
        assert plain(stream.get_final_message()) == plain(whole)


def test_a_stream_that_hides_its_thinking_goes_on(service, harmony):
    service.engine.script = lambda _request: harmony(LONG)
    with service.http() as http:
        text = http.post("/v1/messages", json=fields_of(thinking=HIDDEN, stream=True)).text
    assert 2 < text.count("event: ping") < 20
    assert "thinking_delta" not in text


def test_an_empty_block_can_be_sent_back(client):
    first = client.messages.create(**fields_of(thinking=HIDDEN))
    turns = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And of Italy?"}]
    assert client.messages.create(**fields_of(messages=turns)).content[-1].text
