"""Harmony output: well-formed, malformed (B01, B02, B04, B05), cut anywhere, and with tokens that do not belong."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.tokenizer import load_tokenizer
from server.parsers import HarmonyParser, Kind, choose_parser
from tests.server.conftest import ANSWER, ASSETS, CALL

TOKENIZER = load_tokenizer(ASSETS)
START_OF_ANSWER = TOKENIZER.encode("<|start|>assistant")
TOOLS = frozenset({"get_weather", "f", "now"})
FINAL = "<|channel|>final<|message|>Paris.<|return|>"


def parse(ids, prompt=(), tools=TOOLS):
    """One-shot parse: reasoning, content, calls."""
    parser = HarmonyParser(TOKENIZER, prompt, tools)
    events = [event for token_id in ids for event in parser.feed(token_id)] + parser.finish()
    return gather(events)


def gather(events):
    text = {Kind.REASONING: b"", Kind.CONTENT: b""}
    calls = []
    for event in events:
        if event.kind is not Kind.TOOL_CALL:
            text[event.kind] += event.data
        elif event.name is not None:
            assert event.call == len(calls)
            calls.append([event.name, event.data])
        else:
            calls[event.call][1] += event.data
    return (
        text[Kind.REASONING].decode(errors="replace"),
        text[Kind.CONTENT].decode(errors="replace"),
        [(name, arguments.decode(errors="replace")) for name, arguments in calls],
    )


def parse_text(text, **options):
    return parse(TOKENIZER.encode(text), **options)


def test_bundled_tokenizer_gets_harmony_parser():
    assert isinstance(choose_parser(TOKENIZER)([], frozenset()), HarmonyParser)


def test_reasoning_and_content():
    assert parse_text(ANSWER) == ("The user asks for a capital.", "The capital of France is Paris.", [])


def test_tokens_after_end_of_turn_are_ignored_b01():
    rng = random.Random(1)
    tail = [rng.randrange(4096) for _ in range(10)] + TOKENIZER.encode("<|end|>")
    for ending in ("<|return|>", "<|call|>"):
        good = TOKENIZER.encode(FINAL.replace("<|return|>", ending))
        assert parse(good + tail) == ("", "Paris.", [])


def test_final_message_survives_malformed_headers_b02():
    for malformed in [
        "<|start|><|start|>assistant" + FINAL,
        "<|channel|>analysis<|message|>Hm.<|end|> stray<|start|>assistant" + FINAL,
        "<|channel|><|message|>lost<|end|><|start|>assistant" + FINAL,
        "assistantassistant" + FINAL,
        "<|channel|>final<|channel|>final<|message|>Paris.<|return|>",
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Paris.<|return|>",
        "<|channel|>analysis<|message|>Hm.<|start|>assistant" + FINAL,
        "<|channel|><|message|>final<|message|>Paris.<|return|>",
        "<|channel|>final<|end|><|message|>Paris.<|return|>",
    ]:
        assert parse_text(malformed)[1:] == ("Paris.", []), malformed


def test_without_a_readable_final_message_the_text_is_shown():
    for text, content in [
        ("Paris.", "Paris."),
        ("Paris.<|return|>", "Paris."),
        ("<|message|>Paris.<|return|>", "Paris."),
        ("<|channel|>nowhere<|message|>Paris.<|return|>", "Paris."),
        ("<|channel|>final Paris.<|return|>", "Paris."),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant Paris.<|return|>", "Paris."),
    ]:
        assert parse_text(text)[1:] == (content, []), (text, content)


@pytest.mark.parametrize(
    "text", ["<|channel|>analysis", "<|channel|>", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"]
)
def test_cut_inside_a_header_shows_no_markup(text):
    assert parse_text(text)[1:] == ("", [])


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def test_text_without_its_markup_is_found_g27():
    for text, expected in [
        ("<|channel|>final Paris is the capital", ("", "Paris is the capital", [])),
        (
            "commentary<|message|>Let me think.<|end|>"
            "<|start|>assistant<|channel|>answer<|message|>Paris is it.<|return|>",
            ("", "Let me think.\nParis is it.", []),
        ),
        (THOUGHT + "<|channel|>final Paris is it.<|return|>", ("Hm.", "Paris is it.", [])),
        (THOUGHT + "final Paris is it.<|return|>", ("Hm.", "Paris is it.", [])),
        ("<|channel|>analysis I think so", ("I think so", "", [])),
        ("<|channel|>final <|constrain|>json Paris is it.<|end|>", ("", "Paris is it.", [])),
        ('<|channel|>commentary to=functions.f <|constrain|>json {"a": 1}<|call|>', ("", "", [("f", '{"a": 1}')])),
        ("<|channel|>commentary to=functions.now json<|call|>", ("", "", [("now", "{}")])),
        ("<|channel|>final Paris.<|channel|>analysis<|message|>Hm.<|return|>", ("Hm.", "Paris.", [])),
        ("Paris.<|end|><|start|>assistant" + THOUGHT[: -len("<|start|>assistant")], ("Paris.\nHm.", "", [])),
    ]:
        assert parse_text(text, prompt=START_OF_ANSWER) == expected, (text, expected)


@pytest.mark.parametrize(
    "word", ["comment", "fin", "commentary to=functions.get_wea", "commentary to=functions.f json", "t"]
)
def test_header_words_that_were_cut_short_are_not_shown_g27(word):
    assert parse_text(f"<|channel|>{word}", prompt=START_OF_ANSWER) == ("", "", [])


def test_a_call_that_nobody_offered_is_text_g26(subtests):
    for recipient, channel, tools in itertools.product(
        ["functions.get_weather", "get_weather"],
        ["commentary", "analysis", "final"],
        [frozenset(), frozenset({"get_time"})],
    ):
        with subtests.test(recipient=recipient, channel=channel, tools=tools):
            header = f"<|channel|>{channel} to={recipient} <|constrain|>json<|message|>"
            parser = HarmonyParser(TOKENIZER, START_OF_ANSWER, tools)
            events = [event for i in TOKENIZER.encode(header + '{"a": 1}<|call|>') for event in parser.feed(i)]
            name = "" if (channel, recipient) == ("final", "get_weather") else "get_weather "
            assert gather(events + parser.finish()) == ("", name + '{"a": 1}', [])
            assert parser.num_undeclared_calls == bool(name)


def test_a_tool_may_have_the_prefix_in_its_name_g26():
    text = "<|channel|>commentary to=functions.a<|message|>{}<|call|>"
    assert parse_text(text, tools=frozenset({"functions.a"}))[2] == [("functions.a", "{}")]
    assert parse_text(text, tools=frozenset({"functions.a", "a"}))[2] == [("a", "{}")]


def test_prompt_may_end_inside_a_call():
    prompt = TOKENIZER.encode("<|start|>assistant<|channel|>commentary to=functions.f<|message|>")
    assert parse_text('{"a": 1}<|call|>', prompt=prompt) == ("", "", [("f", '{"a": 1}')])


def test_tool_call_headers_b04(subtests):
    for recipient_first, channel, ending, constrain in itertools.product(
        [True, False],
        ["commentary", "analysis"],
        ["<|call|>", "<|return|>", "<|end|>", ""],
        [" <|constrain|>json", " json", ""],
    ):
        with subtests.test(recipient_first=recipient_first, channel=channel, ending=ending, constrain=constrain):
            to = " to=functions.get_weather"
            header = f"{to}<|channel|>{channel}" if recipient_first else f"<|channel|>{channel}{to}"
            text = f'{header}{constrain}<|message|>{{"city": "Paris"}}{ending}'
            assert parse_text(text, prompt=START_OF_ANSWER) == ("", "", [("get_weather", '{"city": "Paris"}')])


def test_preamble_and_two_calls_b05():
    call = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": %d}<|end|>'
    text = "<|channel|>commentary<|message|>I will look.<|end|>" + call % 1 + call % 2
    assert parse_text(text) == ("", "I will look.", [("f", '{"n": 1}'), ("f", '{"n": 2}')])


def test_constrained_final_is_no_call_b05():
    assert parse_text('<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>') == ("", '{"a": 1}', [])
    assert parse_text('<|channel|>final to=<|constrain|>json<|message|>{"a": 1}<|return|>') == ("", '{"a": 1}', [])


def test_bare_recipient_is_a_call_only_if_declared():
    text = "<|channel|>commentary to=lookup<|message|>{}<|call|>"
    assert parse_text(text, tools=frozenset({"lookup"}))[2] == [("lookup", "{}")]
    assert parse_text(text) == ("", "lookup {}", [])


def test_call_without_arguments_has_an_empty_object():
    assert parse_text("<|channel|>commentary to=functions.now<|message|><|call|>")[2] == [("now", "{}")]


def test_other_roles_are_dropped():
    text = "<|channel|>final<|message|>Hi.<|end|><|start|>user<|message|>And now?<|end|>"
    assert parse_text(text) == ("", "Hi.", [])


def test_prompt_may_end_inside_a_body():
    prompt = TOKENIZER.encode("<|start|>assistant<|channel|>analysis<|message|>")
    assert parse_text("Hm.<|end|><|start|>assistant" + FINAL, prompt=prompt) == ("Hm.", "Paris.", [])


def test_several_messages_of_a_kind_are_joined_by_a_line_break():
    one = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
    assert parse_text(one)[0] == "a\nb"


@pytest.mark.parametrize("transcript", [ANSWER, CALL])
@pytest.mark.parametrize("terminal", [True, False])
def test_any_token_anywhere_never_raises_and_the_final_message_survives(transcript, terminal):
    good = TOKENIZER.encode(transcript)
    expected = parse(good, START_OF_ANSWER)[1:]
    start_of_last_body = len(good) - 1 - good[::-1].index(TOKENIZER.special_tokens["<|message|>"])
    ends = [TOKENIZER.special_tokens[name] for name in ("<|return|>", "<|call|>", "<|endoftext|>")]
    rng = random.Random(2)
    for position in range(len(good) + 1):
        control = [token for token in TOKENIZER.special_tokens.values() if token not in ends]
        inserted = ends if terminal else [*control, *(rng.randrange(4000) for _ in range(20))]
        for token in inserted:
            reasoning, content, calls = parse([*good[:position], token, *good[position:]], START_OF_ANSWER)
            assert not any(name in reasoning + content + str(calls) for name in TOKENIZER.special_tokens)
            if not terminal and position <= start_of_last_body and expected[0]:
                assert content.endswith(expected[0])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from(sorted(TOKENIZER.special_tokens.values())), st.integers(0, 4095)), max_size=60)
)
def test_random_tokens_never_raise(ids):
    reasoning, content, calls = parse(ids, START_OF_ANSWER)
    assert not any(name in reasoning + content + str(calls) for name in TOKENIZER.special_tokens)


@pytest.mark.parametrize(
    "part", ["<|channel|>", "<|message|>", "<|channel|>final", "<|message|> word", "<|constrain|>"]
)
def test_cost_of_repeated_markers_does_not_grow(part):
    """A client can force such output with a logit bias."""
    parse(TOKENIZER.encode(part) * 20000)


def test_text_before_an_early_marker_is_shown_once():
    assert parse_text("<|message|>to=g<|start|>a b<|message|><|return|>") == ("", "a b", [])
    assert parse_text("a b<|message|>c d<|message|>e f<|return|>") == ("", "a b\nc de f", [])


def test_what_came_with_the_prompt_is_not_shown():
    prompt = TOKENIZER.encode("<|start|>assistant<|channel|>analysis<|message|>Hm")
    again = "<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
    assert parse_text(again + FINAL, prompt=prompt) == ("So.", "Paris.", [])
    call = TOKENIZER.encode("<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>")
    assert parse_text(CALL, prompt=call)[2] == [("get_weather", '{"city": "Paris"}')]


def test_cost_per_token_does_not_grow():
    parser = HarmonyParser(TOKENIZER)
    for token_id in TOKENIZER.encode("<|channel|>final<|message|>"):
        parser.feed(token_id)
    word = TOKENIZER.encode(" word")[0]
    assert all(len(parser.feed(word)) == 1 for _ in range(20000))
