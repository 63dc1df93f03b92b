"""`Choice`: engine outputs of any size give the same pieces; stops see content only; log-probabilities stay aligned."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import EngineOutput, TokenLogprobs
from loaders.tokenizer import load_tokenizer
from server.choice import Choice
from server.errors import BadRequest, EngineFailed, TooManyRequests
from server.parsers import HarmonyParser, Kind, PlainParser
from tests.server.conftest import ANSWER, ASSETS, CALL
from tests.tables import rows

TOKENIZER = load_tokenizer(ASSETS)
EMOJI = (
    "<|channel|>analysis<|message|>END é<|end|>"
    "<|start|>assistant<|channel|>final<|message|>naïve 😀😀 END of 日本語.<|return|>"
)
TRANSCRIPTS = [ANSWER, CALL, EMOJI]


def harmony_parser():
    return HarmonyParser(TOKENIZER, tool_names=frozenset({"get_weather", "f"}))


def outputs_of(ids, cuts, finish_reason="stop"):
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    outputs = []
    for start, end in pairwise(edges):
        part = ids[start:end]
        logprobs = [TokenLogprobs(token_id, -token_id / 1000, []) for token_id in part]
        is_last = end == len(ids) and len(outputs) == len(edges) - 2
        outputs.append(
            EngineOutput(
                request_id="r", token_ids=part, logprobs=logprobs, finish_reason=finish_reason if is_last else None
            )
        )
    return outputs


def merged(choice, outputs):
    texts = {Kind.REASONING: "", Kind.CONTENT: ""}
    calls, tokens = [], []
    for output in outputs:
        for piece in choice.push(output):
            tokens += piece.tokens
            if piece.kind is not Kind.TOOL_CALL:
                texts[piece.kind] += piece.text
            elif piece.name is not None:
                calls.append([piece.name, ""])
            else:
                calls[piece.call][1] += piece.text
    return texts[Kind.REASONING], texts[Kind.CONTENT], calls, tokens, choice.finish_reason, choice.num_tokens


@settings(deadline=None)
@given(
    st.sampled_from(TRANSCRIPTS),
    st.lists(st.integers(0, 60), max_size=12),
    st.sampled_from([[], ["END"], ["😀 ", "zzz"], ["P", "Par", "aris"], ["aïv"]]),
)
def test_any_cut_of_outputs_gives_the_same_answer(transcript, cuts, stops):
    ids = TOKENIZER.encode(transcript)
    whole = merged(Choice(harmony_parser(), stops=stops), outputs_of(ids, []))
    cut = merged(Choice(harmony_parser(), stops=stops), outputs_of(ids, cuts))
    assert cut == whole
    content, tokens = whole[1], whole[3]
    assert b"".join(token.data for token in tokens) == content.encode()
    assert "".join(token.text for token in tokens) == content


def test_stop_strings_see_content_only_and_later_tokens_are_not_billed():
    ids = TOKENIZER.encode(EMOJI)
    choice = Choice(harmony_parser(), stops=["END"])
    reasoning, content, _, _, reason, num_tokens = merged(choice, outputs_of(ids, []))
    assert (reasoning, content, reason) == ("END é", "naïve 😀😀 ", "stop")
    assert num_tokens < len(ids)


def test_logprobs_belong_to_their_token():
    ids = TOKENIZER.encode(EMOJI)
    choice = Choice(harmony_parser())
    tokens = merged(choice, outputs_of(ids, [5, 9, 14]))[3]
    assert len(tokens) > 10
    for token in tokens:
        assert choice.logprobs_at(token.position).token_id == ids[token.position]
        assert TOKENIZER.token_bytes(ids[token.position]) == token.data


@rows(
    "transcript, finish_reason, expected",
    (ANSWER, "stop", "stop"),
    (CALL, "stop", "tool_calls"),
    (ANSWER, "length", "length"),
    (CALL, "length", "length"),
)
def test_finish_reasons(transcript, finish_reason, expected):
    choice = Choice(harmony_parser())
    assert merged(choice, outputs_of(TOKENIZER.encode(transcript), [], finish_reason))[4] == expected


def test_second_call_ends_the_answer_if_calls_are_not_parallel():
    call = '<|channel|>commentary to=functions.f<|message|>{"n": %d}<|end|><|start|>assistant'
    choice = Choice(harmony_parser(), max_calls=1)
    result = merged(choice, outputs_of(TOKENIZER.encode(call % 1 + call % 2), []))
    assert result[2] == [["f", '{"n": 1}']]
    assert result[4] == "tool_calls"


def test_an_answer_without_tokens_is_not_an_empty_one():
    choice = Choice(harmony_parser())
    choice.push(EngineOutput(request_id="r", token_ids=[], finish_reason="stop"))
    assert not choice.is_empty


def test_reasoning_tokens_are_counted():
    choice = Choice(harmony_parser())
    merged(choice, outputs_of(TOKENIZER.encode(ANSWER), []))
    assert choice.num_reasoning_tokens == len(TOKENIZER.encode("The user asks for a capital."))


def test_ordinary_stop_token_is_counted_but_not_shown():
    ids = TOKENIZER.encode("one two")
    choice = Choice(PlainParser(TOKENIZER), stop_ids=[ids[-1]])
    last = EngineOutput(request_id="r", token_ids=ids, finish_reason="stop", stop_reason=ids[-1])
    assert "".join(piece.text for piece in choice.push(last)) == TOKENIZER.decode(ids[:-1])
    assert choice.num_tokens == len(ids)


@rows(
    "fields, error",
    ({"error": "too long", "error_param": "max_tokens"}, BadRequest),
    ({"error": "full", "overloaded": True}, TooManyRequests),
    ({"error": "broken"}, EngineFailed),
    ({}, EngineFailed),
)
def test_engine_errors(fields, error):
    choice = Choice(PlainParser(TOKENIZER))
    with pytest.raises(error):
        choice.push(EngineOutput(request_id="r", finish_reason="error", **fields))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 4095), max_size=50), st.integers(0, 2**32))
def test_random_tokens_in_random_outputs_never_raise(ids, seed):
    rng = random.Random(seed)
    cuts = [rng.randrange(50) for _ in range(5)]
    whole = merged(Choice(harmony_parser()), outputs_of(ids, []))
    assert merged(Choice(harmony_parser()), outputs_of(ids, cuts)) == whole


@rows("keeps_tokens", True, False)
def test_a_token_without_text_is_a_piece_of_its_own(keeps_tokens):
    """Clients that count events as tokens would miss it otherwise."""
    hidden = TOKENIZER.encode("<|end|>")[0]
    choice = Choice(PlainParser(TOKENIZER), keeps_tokens=keeps_tokens)
    pieces = [piece for _ in range(3) for piece in choice.push(EngineOutput(request_id="r", token_ids=[hidden]))]
    assert [(piece.kind, piece.text) for piece in pieces] == [(Kind.CONTENT, "")] * 3
    assert choice.is_empty
