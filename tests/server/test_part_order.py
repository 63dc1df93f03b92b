"""A part of an answer is shown to its end before the next part begins, whatever was held back of it."""

import json
from itertools import groupby

from engine.types import EngineOutput
from server.choice import Choice
from server.parsers import Event, Kind, choose_parser
from tests.server.conftest import MODEL, WEATHER
from tests.server.test_deepseek_parser import PieceTokenizer
from tests.tables import rows

CONTENT, REASONING, CALL = Kind.CONTENT, Kind.REASONING, Kind.TOOL_CALL
HALF = "😀".encode()[:2]
STOP = " ~~~"
TOOL = {"type": "function", **WEATHER["function"]}
PREAMBLE = (
    "<|channel|>commentary<|message|>I will check.{}<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.get_weather<|message|>{{}}<|call|>"
)


class SortedTokens:
    """A parser whose tokens say themselves to which part their bytes belong: `parts[token_id]` is (kind, bytes)."""

    num_undeclared_calls = 0

    def __init__(self, parts):
        self._parts = parts
        self._num_calls = 0
        self._position = -1
        self.text_kind = None

    def feed(self, token_id):
        self._position += 1
        kind, data = self._parts[token_id]
        self.text_kind = None if kind is CALL else kind
        if kind is not CALL:
            return [Event(kind, data, self._position)]
        self._num_calls += 1
        call = self._num_calls - 1
        return [Event(kind, b"", call=call, name="f"), Event(kind, data, self._position, call)]

    def finish(self):
        return []


def pieces_of(choice, num_tokens, *, at_once):
    """All pieces of an answer, neighbours of the same part joined: its parts, and the positions of its tokens."""
    cuts = [range(num_tokens)] if at_once else [[position] for position in range(num_tokens)]
    pieces = []
    for ids in cuts:
        reason = "stop" if num_tokens - 1 in ids else None
        pieces += choice.push(EngineOutput(request_id="r", token_ids=list(ids), finish_reason=reason))
    parts = [
        (kind, "".join(piece.text for piece in group))
        for (kind, _), group in groupby(pieces, lambda piece: (piece.kind, piece.call))
    ]
    return parts, [token.position for piece in pieces for token in piece.tokens]


@rows(
    "first, second",
    (CONTENT, CALL),
    (CONTENT, REASONING),
    (REASONING, CONTENT),
    (REASONING, CALL),
    (CALL, CONTENT),
    (CALL, REASONING),
    (CALL, CALL),
)
@rows("held, shown", (b" ~", " ~"), (HALF, "\ufffd"), (b" " + HALF, " \ufffd"))
@rows("stops", [], [STOP], [STOP, " \ufffd~"])
@rows("at_once", False, True)
@rows("keeps_tokens", False, True)
def test_nothing_of_a_part_comes_after_the_next_one(first, second, held, shown, stops, at_once, keeps_tokens):
    parts = [(first, b"a" + held), (second, b"b")]
    choice = Choice(SortedTokens(parts), stops=stops, keeps_tokens=keeps_tokens)
    pieces, positions = pieces_of(choice, len(parts), at_once=at_once)
    assert pieces == [(first, "a" + shown), (second, "b")]
    if keeps_tokens:
        assert positions == [position for position, (kind, _) in enumerate(parts) if kind is CONTENT]


@rows("between", CALL, REASONING)
@rows("at_once", False, True)
def test_a_stop_string_does_not_reach_over_another_part(between, at_once):
    parts = [(CONTENT, b"a ~"), (between, b"b"), (CONTENT, b"~~ ~~"), (CONTENT, b"~c")]
    choice = Choice(SortedTokens(parts), stops=[STOP])
    pieces, positions = pieces_of(choice, len(parts), at_once=at_once)
    assert pieces == [(CONTENT, "a ~"), (between, "b"), (CONTENT, "~~")]
    assert (choice.finish_reason, choice.matched_stop, positions) == ("stop", STOP, [0, 2])


def test_a_character_that_is_cut_off_by_another_part_may_complete_a_stop_string():
    parts = [(CONTENT, b"a" + HALF), (CALL, b"b")]
    choice = Choice(SortedTokens(parts), stops=["\ufffd"])
    assert pieces_of(choice, len(parts), at_once=False) == ([(CONTENT, "a")], [0])
    assert choice.finish_reason == "stop"


def test_no_text_takes_the_short_cut_before_the_last_part_has_ended():
    """After `</think>` any text is content, but half a character of the reasoning is still to be shown."""
    tokenizer = PieceTokenizer()
    think, *ids = tokenizer.cut("<think>a</think>b")
    ids[1:1] = tokenizer.cut("😀")[:2]
    choice = Choice(choose_parser(tokenizer)([think], frozenset()), keeps_tokens=False)
    kinds, pieces = [], []
    for token_id in ids:
        pieces += choice.push(EngineOutput(request_id="r", token_ids=[token_id]))
        kinds.append(choice.text_kind)
    assert kinds == [REASONING, None, None, None, CONTENT]
    assert [(piece.kind, piece.text) for piece in pieces] == [(REASONING, "a"), (REASONING, "\ufffd"), (CONTENT, "b")]


def test_content_before_a_call_too_many_is_shown():
    parts = [(CALL, b"a"), (CONTENT, b"b ~"), (CALL, b"c")]
    choice = Choice(SortedTokens(parts), stops=[STOP], max_calls=1)
    assert pieces_of(choice, len(parts), at_once=False)[0] == [(CALL, "a"), (CONTENT, "b ~")]
    assert choice.finish_reason == "tool_calls"


def chat_parts(events):
    deltas = [event["choices"][0]["delta"] for event in events if event.get("choices")]
    return [key for delta in deltas for key in ("content", "tool_calls") if delta.get(key)], "".join(
        delta.get("content") or "" for delta in deltas
    )


def message_parts(events):
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    return [block["type"] for block in blocks], "".join(
        event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"
    )


def response_parts(events):
    output = events[-1]["response"]["output"]
    return [item["type"] for item in output], output[0]["content"][0]["text"]


@rows(
    "path, fields, parts_of, expected",
    ("/v1/chat/completions", {"tools": [WEATHER], "stop": ["\n\nHuman:"]}, chat_parts, ["content", "tool_calls"]),
    (
        "/v1/messages",
        {
            "tools": [{"name": "get_weather", "input_schema": {"type": "object"}}],
            "stop_sequences": ["\n\nHuman:"],
            "max_tokens": 99,
        },
        message_parts,
        ["text", "tool_use"],
    ),
    ("/v1/responses", {"tools": [TOOL]}, response_parts, ["message", "function_call"]),
)
@rows("end, text", ("\n\n", "\n\n"), ("half", "\ufffd"))
def test_every_endpoint_shows_the_parts_in_order(path, fields, parts_of, expected, end, text, service, tokenizer):
    """The text before a call ends with the beginning of a stop string, or within a character."""
    before, after = (tokenizer.encode(part) for part in PREAMBLE.format("\0").split("\0"))
    held = tokenizer.encode("😀")[:1] if end == "half" else tokenizer.encode(end)
    service.engine.script = lambda _request: [*before, *held, *after]
    question = [{"role": "user", "content": "Hi"}]
    asked = {"input" if path == "/v1/responses" else "messages": question}
    with service.http() as http:
        answer = http.post(path, json={"model": MODEL, "stream": True, **asked, **fields})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    kinds, shown = parts_of([json.loads(line) for line in lines])
    assert [kind for kind, _ in groupby(kinds)] == expected
    assert shown == "I will check." + text
