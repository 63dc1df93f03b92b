"""Events of plain text are made from a sample: they equal those that are encoded one by one, byte for byte."""

import itertools

import orjson

from engine.types import EngineOutput
from loaders.tokenizer import load_tokenizer
from server.chat_answer import ChatAnswer
from server.completion_answer import CompletionAnswer
from server.config import ServerConfig
from server.convert import Converter
from server.sampling_defaults import SamplingDefaults
from server.schema.chat import ChatCompletionRequest
from server.schema.completions import CompletionRequest
from tests.server.conftest import ANSWER, ASSETS, CALL, WEATHER, FakeEngine
from tests.tables import rows

TOKENIZER = load_tokenizer(ASSETS)
CONVERTER = Converter(TOKENIZER, ServerConfig(), SamplingDefaults())
INFO = FakeEngine().info
TEXT = 'A "quoted" \\ line\nwith a tab\t, \x07 and </script> naïve 😀 日本語'
TRANSCRIPTS = [
    ANSWER,
    CALL,
    f"<|channel|>analysis<|message|>{TEXT}<|end|><|start|>assistant<|channel|>final<|message|>{TEXT}",
]


def chat_answer(num_choices):
    fields = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER], "n": num_choices, "stream": True}
    prepared = CONVERTER.chat(ChatCompletionRequest.model_validate(fields), INFO, "r")
    return ChatAnswer(prepared, TOKENIZER, model='a "model"', request_id="r", logprobs=False)


def completion_answer(num_choices):
    wire = CompletionRequest.model_validate({"prompt": "hi", "n": num_choices, "stream": True})
    prepared = CONVERTER.completion(wire, INFO, "r")
    return CompletionAnswer(prepared, TOKENIZER, model='a "model"', request_id="r", wire=wire)


def events_of(answer, transcript, *, with_usage):
    """All events, without the usage and with the same id for every tool call and second."""
    ids = TOKENIZER.encode(transcript)
    events = []
    for position, index in itertools.product(range(len(ids)), range(len(answer.choices))):
        reason = "stop" if position == len(ids) - 1 else None
        output = EngineOutput(request_id="r", token_ids=[ids[position]], finish_reason=reason)
        events += answer.events(index, output, with_usage=with_usage)
    chunks = []
    for event in events:
        assert (event[:6], event[-2:]) == (b"data: ", b"\n\n")
        chunk = orjson.loads(event[6:])
        assert event[6:-2] == orjson.dumps(chunk)
        assert (chunk.pop("usage", None) is not None) == with_usage
        for call in chunk["choices"][0].get("delta", {}).get("tool_calls", ()):
            call.pop("id", None)
        chunks.append(chunk | {"created": 0})
    return [orjson.dumps(chunk) for chunk in chunks]


@rows("make", chat_answer, completion_answer)
@rows("transcript", *TRANSCRIPTS)
def test_sampled_events_equal_those_encoded_one_by_one(make, transcript):
    sampled = events_of(make(2), transcript, with_usage=False)
    assert sampled == events_of(make(2), transcript, with_usage=True)
    assert len(sampled) > 10


def test_nothing_comes_after_the_end_of_a_choice():
    answer = completion_answer(1)
    last = EngineOutput(request_id="r", token_ids=[300], finish_reason="length")
    assert len(answer.events(0, last)) == 2
    assert answer.events(0, last) == []
