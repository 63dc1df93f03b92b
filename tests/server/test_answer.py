"""Events of plain text are made from a sample: they equal those that are encoded one by one, byte for byte."""

import itertools

import orjson

from engine.types import EngineOutput
from loaders.tokenizer import load_tokenizer
from server.config import ServerConfig
from server.convert import Converter
from server.renderers import ChatRenderer, CompletionRenderer
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


def chat_renderer(num_choices, **fields):
    fields = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER], "n": num_choices, **fields}
    wire = ChatCompletionRequest.model_validate(fields)
    return ChatRenderer(CONVERTER.chat(wire, INFO, "r"), TOKENIZER, wire, model='a "model"', request_id="r")


def completion_renderer(num_choices, **fields):
    wire = CompletionRequest.model_validate({"prompt": "hi", "n": num_choices, **fields})
    return CompletionRenderer(CONVERTER.completion(wire, INFO, "r"), TOKENIZER, wire, model='a "model"', request_id="r")


def outputs_of(renderer, transcript):
    """Each token of each choice by itself, as the engine sends them."""
    ids = TOKENIZER.encode(transcript)
    for position, index in itertools.product(range(len(ids)), range(len(renderer.choices))):
        reason = "stop" if position == len(ids) - 1 else None
        yield index, EngineOutput(request_id="r", token_ids=[ids[position]], finish_reason=reason)


def events_of(renderer, transcript, *, with_usage):
    """All events, without the usage and with the same id for every tool call and second."""
    streamed = b"".join(renderer.stream(index, output) for index, output in outputs_of(renderer, transcript))
    chunks = []
    for event in streamed.split(b"\n\n")[:-1]:
        assert event[:6] == b"data: "
        chunk = orjson.loads(event[6:])
        assert event[6:] == orjson.dumps(chunk)
        assert (chunk.pop("usage", None) is not None) == with_usage
        for call in chunk["choices"][0].get("delta", {}).get("tool_calls", ()):
            call.pop("id", None)
        chunks.append(chunk | {"created": 0})
    return [orjson.dumps(chunk) for chunk in chunks]


@rows("make", chat_renderer, completion_renderer)
@rows("transcript", *TRANSCRIPTS)
def test_sampled_events_equal_those_encoded_one_by_one(make, transcript):
    sampled = events_of(make(2, stream=True), transcript, with_usage=False)
    options = {"continuous_usage_stats": True}
    assert sampled == events_of(make(2, stream=True, stream_options=options), transcript, with_usage=True)
    assert len(sampled) > 10


def test_nothing_comes_after_the_end_of_a_choice():
    renderer = completion_renderer(1, stream=True)
    last = EngineOutput(request_id="r", token_ids=[300], finish_reason="length")
    assert renderer.stream(0, last).count(b"data: ") == 2
    assert renderer.stream(0, last) == b""


def test_the_short_cut_takes_tokens_after_a_cached_prompt():
    renderer = completion_renderer(1)
    ids = TOKENIZER.encode("some plain text")
    outputs = [EngineOutput(request_id="r", token_ids=[token_id], num_cached_tokens=48) for token_id in ids]
    [texts] = renderer.text_events
    assert texts.take(outputs[0]) is None  # it brings the number of cached tokens
    renderer.stream(0, outputs[0])
    assert None not in [texts.take(output) for output in outputs[1:]]
    assert (renderer.counts.num_completion, renderer.choices[0].num_cached_tokens) == (len(ids), 48)
