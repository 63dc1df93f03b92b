"""Times and token counts of an answer, however the server cuts and counts it."""

import random

import pytest

from server.bench.errors import RequestFailed
from server.bench.events import AnswerReader, EventSplitter
from tests.server.bench.fake_server import event, text_chunk, usage_of
from tests.tables import rows

DONE = event(b"[DONE]")


def read(*steps):
    """Each step is bytes that arrive at second 1, 2, 3..."""
    reader = AnswerReader()
    for second, data in enumerate(steps, start=1):
        reader.feed(data, float(second))
    return reader


def delta(finish=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def test_events_cut_anywhere():
    data = b": comment\r\n\r\ndata: a\r\n\r\ndata:b\ndata: c\nid: 7\n\n\n\nevent: x\n\ndata:  d\n\n"
    for cut in range(len(data)):
        splitter = EventSplitter()
        assert splitter.feed(data[:cut]) + splitter.feed(data[cut:]) == [b"a", b"b\nc", b" d"], cut
    splitter = EventSplitter()
    assert [e for i in range(len(data)) for e in splitter.feed(data[i : i + 1])] == [b"a", b"b\nc", b" d"]


def test_lines_that_end_in_cr_alone():
    data = b": comment\r\rdata: a\r\rdata:b\rdata: c\r\r"
    for cut in range(len(data)):
        splitter = EventSplitter()
        assert splitter.feed(data[:cut]) + splitter.feed(data[cut:]) == [b"a", b"b\nc"], cut


def test_usage_in_every_chunk_counts_tokens_without_text():
    reader = read(
        event(text_chunk("", **usage_of(9, 0))),  # no token yet
        event(text_chunk("", **usage_of(9, 1))),  # half a character
        event(text_chunk("ä", **usage_of(9, 2))),
        event(text_chunk("abc", **usage_of(9, 5))) + event(text_chunk("", **usage_of(9, 5))),
        event(text_chunk("", "stop", **usage_of(9, 6))),  # the stop token
        event({"choices": [], **usage_of(9, 6)}) + DONE,
    )
    reader.finish()
    assert (list(reader.times), list(reader.counts)) == ([2, 3, 4, 5], [1, 1, 3, 1])
    assert (reader.prompt_tokens, reader.output_tokens, reader.counting) == (9, 6, "per chunk")


def test_usage_in_the_last_chunk_has_the_total():
    for last in ({"choices": [], **usage_of(9, 6)}, text_chunk("", "stop", **usage_of(9, 6))):
        reader = read(event(text_chunk("a")), event(text_chunk("")), event(text_chunk("b")), event(last) + DONE)
        reader.finish()
        assert (list(reader.times), list(reader.counts)) == ([1, 3], [1, 1])  # the other four have no time
        assert (reader.prompt_tokens, reader.output_tokens, reader.counting) == (9, 6, "usage")


@rows("usage", {"usage": {}}, usage_of(9, None), usage_of(None, None), usage_of(0, 0), {"usage": None})
def test_a_usage_that_counts_nothing_yet_leaves_the_times_to_the_chunks(usage):
    reader = read(
        event(text_chunk("a", **usage)),
        event(text_chunk("b", **usage)),
        event(text_chunk("", "stop", **usage_of(9, 3))) + DONE,
    )
    reader.finish()
    assert (list(reader.times), list(reader.counts)) == ([1, 2], [1, 1])
    assert (reader.prompt_tokens, reader.output_tokens, reader.counting) == (9, 3, "usage")


def test_two_chunks_of_one_token_are_counted_by_usage():
    reader = read(event(text_chunk("a", **usage_of(9, 1))), event(text_chunk("b", "stop", **usage_of(9, 1))))
    assert (list(reader.times), list(reader.counts), reader.counting) == ([1], [1], "per chunk")


def test_no_usage_counts_chunks_with_text():
    reader = read(
        event(delta(role="assistant", content="")),
        event(delta(reasoning="hm")),
        event(delta(reasoning_content="hm")),
        event(delta(tool_calls=[{"index": 0}])),
        event(delta(content="x")),
        event(delta("stop")),
    )
    reader.finish()
    assert (list(reader.times), reader.output_tokens, reader.prompt_tokens) == ([2, 3, 4, 5], 4, None)
    assert reader.counting == "chunks"


def test_random_cuts_give_the_same_counts():
    data = b"".join(event(text_chunk("ä", **usage_of(3, n))) for n in range(1, 30)) + DONE
    for seed in range(20):
        reader, at, draw = AnswerReader(), 0, random.Random(seed)
        while at < len(data):
            size = draw.randint(1, 200)
            reader.feed(data[at : at + size], float(at))
            at += size
        assert (reader.output_tokens, sum(reader.counts)) == (29, 29)


@rows(
    "data, kind",
    (event(text_chunk("a")), "cut short"),
    (event(text_chunk("", "stop")) + DONE, "no tokens"),
    (event({"choices": [], **usage_of(3, 0)}) + DONE, "no tokens"),
    (event({"error": {"message": "the engine died"}}), "error in stream"),
    (event(b"{oops"), "bad response"),
    (event(b"[1]"), "bad response"),
    (b"", "cut short"),
    (event({"choices": ["a"]}), "bad response"),
    (event({"choices": {"a": 1}}), "bad response"),
    (event({"choices": [{"delta": "a"}]}), "bad response"),
    (event({"choices": [], "usage": [1]}), "bad response"),
    (event(text_chunk("a", **usage_of(3, "1"))), "bad response"),
    (event(text_chunk("a", **usage_of(3, 1.0))), "bad response"),
    (event(text_chunk("a", **usage_of(3, True))), "bad response"),
    (event(text_chunk("a", **usage_of(3, -1))), "bad response"),
    (event(text_chunk("a", **usage_of(3, 2**62))), "bad response"),
    (event(text_chunk("a", **usage_of("3", 1))), "bad response"),
    (event({"choices": [None]}) + DONE, "no tokens"),
)
def test_answers_that_failed(data, kind):
    with pytest.raises(RequestFailed) as caught:
        read(data).finish()
    assert caught.value.kind == kind
    if kind == "error in stream":
        assert caught.value.detail == "the engine died"


def test_a_finish_reason_is_an_end_too():
    reader = read(event(text_chunk("a", "length")))
    reader.finish()
    assert (reader.output_tokens, list(reader.counts)) == (1, [1])
