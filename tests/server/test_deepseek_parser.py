"""DeepSeek output: reasoning by the prompt's end (B10), both spellings of tool calls, any cut into tokens (B11)."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.parsers import DeepSeekParser, Kind, choose_parser
from tests.tables import rows

MARKERS = [
    "<think>",
    "</think>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜end▁of▁sentence｜>",
]


class PieceTokenizer:
    """A tokenizer whose ordinary tokens are whatever pieces a test cuts a text into."""

    def __init__(self):
        self.special_tokens = {name: index for index, name in enumerate(MARKERS)}
        self._pieces = {}

    def token_bytes(self, token_id):
        return self._pieces[token_id]

    def cut(self, text, rng=None):
        """Markers are tokens; the text between is cut at random, or into single bytes without `rng`."""
        ids = []
        while text:
            marker = next((name for name in MARKERS if text.startswith(name)), None)
            if marker:
                ids.append(self.special_tokens[marker])
                text = text[len(marker) :]
                continue
            end = min([position for name in MARKERS if (position := text.find(name)) >= 0], default=len(text))
            data, text = text[:end].encode(), text[end:]
            while data:
                size = 1 if rng is None else rng.randint(1, len(data))
                token_id = 100 + len(self._pieces)
                self._pieces[token_id] = data[:size]
                ids.append(token_id)
                data = data[size:]
        return ids


TOOLS = frozenset({"get_weather", "get_time", "function"})


def parse(text, *, prompt="<｜Assistant｜>", rng=None, finish=True, tools=TOOLS):
    tokenizer = PieceTokenizer()
    parser = choose_parser(tokenizer)(tokenizer.cut(prompt), tools)
    assert isinstance(parser, DeepSeekParser)
    events = [event for token_id in tokenizer.cut(text, rng) for event in parser.feed(token_id)]
    events += parser.finish() if finish else []
    texts = {Kind.REASONING: b"", Kind.CONTENT: b""}
    calls = []
    for event in events:
        if event.kind is not Kind.TOOL_CALL:
            texts[event.kind] += event.data
        elif event.name is not None:
            calls.append((event.name, b""))
        else:
            calls[event.call] = (calls[event.call][0], calls[event.call][1] + event.data)
    return texts[Kind.REASONING].decode(), texts[Kind.CONTENT].decode(), [(n, a.decode()) for n, a in calls]


V3 = (
    "Let me look.<｜tool▁calls▁begin｜>"
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Zürich"}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
)
V31 = (
    "<｜tool▁calls▁begin｜>"
    '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Zürich"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
)
CALLS = [("get_weather", '{"city": "Zürich"}'), ("get_time", "{}")]
CASES = [
    (V3, "<｜Assistant｜>", ("", "Let me look.", CALLS)),
    (V31, "<｜Assistant｜></think>", ("", "", CALLS)),
    ("Hm.\n</think>\n\n" + V3, "<｜Assistant｜><think>\n", ("Hm.\n", "Let me look.", CALLS)),
    ("<think>Hm.</think>Hi.", "<｜Assistant｜>", ("Hm.", "Hi.", [])),
    ("<think>Hm.</think>Hi.", "<｜Assistant｜><think>", ("Hm.", "Hi.", [])),
    ("Hm.</think>Hi.", "<｜Assistant｜><think>\n", ("Hm.", "Hi.", [])),
    ("Hm.</think>Hi.", "<｜Assistant｜>", ("", "Hm.Hi.", [])),
    ("Hi.", "<｜Assistant｜>", ("", "Hi.", [])),
    ("Hm. and", "<｜Assistant｜><think>\n", ("Hm. and", "", [])),
    ("<think>Hm. and", "<｜Assistant｜>", ("Hm. and", "", [])),
    ("Hi.<｜end▁of▁sentence｜>more<think>x", "<｜Assistant｜>", ("", "Hi.", [])),
]


def test_parse():
    for text, prompt, expected in CASES:
        assert parse(text, prompt=prompt) == expected, (text, prompt, expected)


def call_text(name, body, ending="<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"):
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{body}{ending}"


@rows("seed", 1, 2)
@rows("name", "function", "get_weather")
@rows("body", '{"a": 1}', '\n{"a": 1}', '```json\n{"a": 1}\n```', '```\n{"a": 1}\n```\n', ' {"a": 1}')
def test_v31_calls_with_any_name_and_a_block_g28(seed, name, body):
    text = "Hi." + call_text(name, body)
    assert parse(text, rng=random.Random(seed)) == ("", "Hi.", [(name, '{"a": 1}')])


def test_odd_calls_g28():
    for text, expected in [
        (call_text("function", 'get_weather\n{"a": 1}'), ("", "", [("get_weather", '{"a": 1}')])),
        (call_text("function", "get_weather"), ("", "", [("get_weather", "{}")])),
        (call_text("get_time", ""), ("", "", [("get_time", "{}")])),
        (call_text("get_time", "", ending=""), ("", "", [("get_time", "")])),
        (call_text("get_weather", "```json\n", ending=""), ("", "", [("get_weather", "")])),
        (call_text("function", "get_wea", ending=""), ("", "", [])),
        ("Hi.<｜tool▁calls▁begin｜>a b<｜tool▁call▁begin｜>c<｜tool▁call▁end｜>", ("", "Hi.\na b\nc", [])),
    ]:
        assert parse(text) == expected, (text, expected)


@rows("tools", frozenset(), frozenset({"get_time"}))
@rows("text", call_text("get_weather", '{"a": 1}'), call_text("function", 'get_weather\n```json\n{"a": 1}\n```'))
def test_a_call_that_nobody_offered_is_text_g26(text, tools):
    assert parse("Hi." + text, tools=tools) == ("", 'Hi.\nget_weather {"a": 1}', [])


@rows("head", "function<｜tool▁sep｜>get_weather\n", "get_weather<｜tool▁sep｜>```json\n")
def test_cost_of_a_long_call_does_not_grow(head):
    body = "1234567890" * 5000
    assert parse(f"<｜tool▁call▁begin｜>{head}{body}<｜tool▁call▁end｜>")[2] == [("get_weather", body)]


def test_invented_results_and_questions_are_not_the_answer():
    result = "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>sunny<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    call = call_text("get_time", "{}", ending="<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
    assert parse(call + result + "Done.") == ("", "Done.", [("get_time", "{}")])
    assert parse("Hi.<｜User｜>And now?<｜Assistant｜>Bye.") == ("", "Hi.Bye.", [])


@settings(deadline=None)
@given(st.sampled_from(CASES), st.integers(0, 2**32))
def test_any_cut_gives_the_same_parse(case, seed):
    text, prompt, expected = case
    assert parse(text, prompt=prompt, rng=random.Random(seed)) == expected


def test_a_cut_call_is_not_completed():
    cut = V3[: V3.index('"Zür')]
    assert parse(cut)[2] == [("get_weather", '{"city": ')]
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(parse(cut)[2][0][1])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*MARKERS, "a", "\n", "```json\n", "{}", "function"]), max_size=30))
def test_random_sequences_never_raise(parts):
    reasoning, content, calls = parse("".join(parts))
    assert not any(name in reasoning + content + str(calls) for name in MARKERS)
