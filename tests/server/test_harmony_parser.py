"""Harmony output: well-formed, malformed (B01, B02, B04, B05), cut anywhere, and with tokens that do not belong."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.tokenizer import load_tokenizer
from server.parsers import HarmonyParser, Kind, choose_parser
from tests.server.conftest import ANSWER, ASSETS, CALL
from tests.tables import rows

TOKENIZER = load_tokenizer(ASSETS)
START_OF_ANSWER = TOKENIZER.encode("<|start|>assistant")
TOOLS = frozenset({"get_weather", "f", "now"})
FINAL = "<|channel|>final<|message|>Paris.<|return|>"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL_F = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": %d}<|end|>'


def parse(ids, prompt=(), tools=TOOLS):
    """One-shot parse: reasoning, content, calls."""
    parser = choose_parser(TOKENIZER)(prompt, tools)
    assert isinstance(parser, HarmonyParser)
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


@rows(
    "text, reasoning, content, calls",
    (ANSWER, "The user asks for a capital.", "The capital of France is Paris.", []),
    (THOUGHT + "<|channel|>analysis<|message|>b<|end|>", "Hm.\nb", "", []),
    ("<|channel|>final<|message|>Hi.<|end|><|start|>user<|message|>And now?<|end|>", "", "Hi.", []),
    ("<|channel|>commentary to=functions.now<|message|><|call|>", "", "", [("now", "{}")]),
    ("<|channel|>commentary to=lookup<|message|>{}<|call|>", "", "lookup {}", []),
    # B05: a preamble and two calls; a constrained final message is no call.
    (
        "<|channel|>commentary<|message|>I will look.<|end|>" + CALL_F % 1 + CALL_F % 2,
        *("", "I will look.", [("f", '{"n": 1}'), ("f", '{"n": 2}')]),
    ),
    ('<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>', "", '{"a": 1}', []),
    ('<|channel|>final to=<|constrain|>json<|message|>{"a": 1}<|return|>', "", '{"a": 1}', []),
    # B02: malformed headers; None: what is thought does not matter.
    ("<|start|><|start|>assistant" + FINAL, None, "Paris.", []),
    ("<|channel|>analysis<|message|>Hm.<|end|> stray<|start|>assistant" + FINAL, None, "Paris.", []),
    ("<|channel|><|message|>lost<|end|><|start|>assistant" + FINAL, None, "Paris.", []),
    ("assistantassistant" + FINAL, None, "Paris.", []),
    ("<|channel|>final<|channel|>final<|message|>Paris.<|return|>", None, "Paris.", []),
    ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Paris.<|return|>", None, "Paris.", []),
    ("<|channel|>analysis<|message|>Hm.<|start|>assistant" + FINAL, None, "Paris.", []),
    ("<|channel|><|message|>final<|message|>Paris.<|return|>", None, "Paris.", []),
    ("<|channel|>final<|end|><|message|>Paris.<|return|>", None, "Paris.", []),
    # Without a readable final message the text is shown, once.
    *((text, None, "Paris.", []) for text in ("Paris.", "Paris.<|return|>", "<|message|>Paris.<|return|>")),
    ("<|channel|>nowhere<|message|>Paris.<|return|>", None, "Paris.", []),
    ("<|channel|>final Paris.<|return|>", None, "Paris.", []),
    (THOUGHT + " Paris.<|return|>", None, "Paris.", []),
    ("<|message|>to=g<|start|>a b<|message|><|return|>", "", "a b", []),
    ("a b<|message|>c d<|message|>e f<|return|>", "", "a b\nc de f", []),
    # Cut inside a header.
    *((text, None, "", []) for text in ("<|channel|>analysis", "<|channel|>", THOUGHT)),
)
def test_the_parts_of_a_turn(text, reasoning, content, calls):
    found = parse_text(text)
    assert found == (found[0] if reasoning is None else reasoning, content, calls)


@rows(
    "text, reasoning, content, calls",
    ("<|channel|>final Paris is the capital", "", "Paris is the capital", []),
    (
        "commentary<|message|>Let me think.<|end|><|start|>assistant<|channel|>answer<|message|>Paris is it.<|return|>",
        *("", "Let me think.\nParis is it.", []),
    ),
    (THOUGHT + "<|channel|>final Paris is it.<|return|>", "Hm.", "Paris is it.", []),
    (THOUGHT + "final Paris is it.<|return|>", "Hm.", "Paris is it.", []),
    ("<|channel|>analysis I think so", "I think so", "", []),
    ("<|channel|>final <|constrain|>json Paris is it.<|end|>", "", "Paris is it.", []),
    ('<|channel|>commentary to=functions.f <|constrain|>json {"a": 1}<|call|>', "", "", [("f", '{"a": 1}')]),
    ("<|channel|>commentary to=functions.now json<|call|>", "", "", [("now", "{}")]),
    ("<|channel|>final Paris.<|channel|>analysis<|message|>Hm.<|return|>", "Hm.", "Paris.", []),
    ("Paris.<|end|><|start|>assistant" + THOUGHT[: -len("<|start|>assistant")], "Paris.\nHm.", "", []),
    # Text before a recipient is none of the arguments.
    ('Hm.<|channel|>commentary to=functions.f {"a": 1}<|call|>', "Hm.", "", [("f", '{"a": 1}')]),
    ('Hm.<|channel|>commentary to=lookup {"a": 1}<|call|>', "Hm.", 'lookup {"a": 1}', []),
    ("Hm.<|channel|>commentary to=functions.now<|call|>", "Hm.", "", [("now", "{}")]),
    ("Paris.<|channel|>commentary to=functions.get_wea", "", "Paris.", []),
    ("a b<|channel|>commentary to=f<|start|>c d", "", "a b\nc d", []),
    # Header words that were cut short are not shown.
    *((f"<|channel|>{word}", "", "", []) for word in ("comment", "fin", "commentary to=functions.get_wea", "t")),
    ("<|channel|>commentary to=functions.f json", "", "", []),
)
def test_text_without_its_markup_is_found_g27(text, reasoning, content, calls):
    assert parse_text(text, prompt=START_OF_ANSWER) == (reasoning, content, calls)


@rows(
    "name, declared, calls",
    ("functions.a", {"functions.a"}, [("functions.a", "{}")]),
    ("functions.a", {"functions.a", "a"}, [("a", "{}")]),
    ("lookup", {"lookup"}, [("lookup", "{}")]),
)
def test_a_recipient_is_the_tool_that_was_declared_g26(name, declared, calls):
    text = f"<|channel|>commentary to={name}<|message|>{{}}<|call|>"
    assert parse_text(text, tools=frozenset(declared)) == ("", "", calls)


@rows(
    "prompt, text, reasoning, content, calls",
    ("commentary to=functions.f<|message|>", '{"a": 1}<|call|>', "", "", [("f", '{"a": 1}')]),
    ("analysis<|message|>", "Hm.<|end|><|start|>assistant" + FINAL, "Hm.", "Paris.", []),
    # What came with the prompt is not shown.
    ("analysis<|message|>Hm", f"<|end|><|start|>assistant{THOUGHT}{FINAL}", "Hm.", "Paris.", []),
    (
        "commentary to=functions.f<|message|>{}<|call|>",
        *(CALL, "I need the weather.", "", [("get_weather", '{"city": "Paris"}')]),
    ),
)
def test_a_prompt_may_end_inside_a_message(prompt, text, reasoning, content, calls):
    prompt_ids = TOKENIZER.encode("<|start|>assistant<|channel|>" + prompt)
    assert parse_text(text, prompt=prompt_ids) == (reasoning, content, calls)


def test_tokens_after_end_of_turn_are_ignored_b01():
    rng = random.Random(1)
    tail = [rng.randrange(4096) for _ in range(10)] + TOKENIZER.encode("<|end|>")
    for ending in ("<|return|>", "<|call|>"):
        good = TOKENIZER.encode(FINAL.replace("<|return|>", ending))
        assert parse(good + tail) == ("", "Paris.", [])


@rows("recipient", "functions.get_weather", "get_weather")
@rows("channel", "commentary", "analysis", "final")
@rows("tools", frozenset(), frozenset({"get_time"}))
def test_a_call_that_nobody_offered_is_text_g26(recipient, channel, tools):
    header = f"<|channel|>{channel} to={recipient} <|constrain|>json<|message|>"
    parser = HarmonyParser(TOKENIZER, START_OF_ANSWER, tools)
    events = [event for i in TOKENIZER.encode(header + '{"a": 1}<|call|>') for event in parser.feed(i)]
    name = "" if (channel, recipient) == ("final", "get_weather") else "get_weather "
    assert gather(events + parser.finish()) == ("", name + '{"a": 1}', [])
    assert parser.num_undeclared_calls == bool(name)


@rows("recipient_first", True, False)
@rows("channel", "commentary", "analysis")
@rows("ending", "<|call|>", "<|return|>", "<|end|>", "")
@rows("constrain", " <|constrain|>json", " json", "")
def test_tool_call_headers_b04(recipient_first, channel, ending, constrain):
    to = " to=functions.get_weather"
    header = f"{to}<|channel|>{channel}" if recipient_first else f"<|channel|>{channel}{to}"
    text = f'{header}{constrain}<|message|>{{"city": "Paris"}}{ending}'
    assert parse_text(text, prompt=START_OF_ANSWER) == ("", "", [("get_weather", '{"city": "Paris"}')])


@rows("transcript", ANSWER, CALL)
@rows("terminal", True, False)
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


@rows("part", "<|channel|>", "<|message|>", "<|channel|>final", "<|message|> word", "<|constrain|>")
def test_cost_of_repeated_markers_does_not_grow(part):
    """A client can force such output with a logit bias."""
    parse(TOKENIZER.encode(part) * 20000)


def test_cost_per_token_does_not_grow():
    parser = HarmonyParser(TOKENIZER)
    for token_id in TOKENIZER.encode("<|channel|>final<|message|>"):
        parser.feed(token_id)
    word = TOKENIZER.encode(" word")[0]
    assert all(len(parser.feed(word)) == 1 for _ in range(20000))
