"""Loads against servers that answer in all the ways servers do; every request ends as exactly one record."""

import asyncio
import itertools
import json
import socket
import time

import pytest

from server.bench.config import BenchConfig, Lengths
from server.bench.connection import Target
from server.bench.errors import BenchError
from server.bench.load import Load, Share
from server.bench.probe import probe
from server.bench.workload import Accepted, Workload
from tests.server.bench.fake_server import END, STREAM_HEAD, chunked, event, polite, serve, text_chunk, usage_of, whole
from tests.tables import rows

WHOLE = Share(0, 1)
ACCEPTED = Accepted(
    model="fake", stream_options={"include_usage": True, "continuous_usage_stats": True}, takes_ids=True
)


def make_config(url, **fields):
    defaults = {"concurrency": 3, "num_requests": 10, "answer_tokens": Lengths(4, 4), "prompt_tokens": Lengths(8, 8)}
    if "request_rate" in fields:
        defaults["concurrency"] = None
    return BenchConfig(target=Target.parse(url, fields.pop("api_key", None)), **{**defaults, **fields})


def run(config, accepted=ACCEPTED, share=WHOLE):
    async def main():
        load = Load(config, accepted, share)
        await load.warm_up()
        await load.run(time.monotonic())
        load.close()
        return load.records

    return asyncio.run(main())


def kinds(records):
    return [record.error for record in records]


def test_streams_send_one_after_the_other_on_their_connections():
    with serve(polite) as server:
        records = run(make_config(server.url, warmup=3, api_key="k"))
        assert server.num_connections == 3
    assert len(records) == 10
    assert len(server.posts) == 13  # with the warm-up
    for record in records:
        assert (record.error, record.is_cut, record.counting) == (None, False, "per chunk")
        assert (record.prompt_tokens, record.output_tokens, sum(record.counts)) == (8, 4, 4)
        assert record.start_s < record.times[0] <= record.times[-1] <= record.end_s
    first = server.posts[0]
    assert first.headers["authorization"] == "Bearer k"
    assert len(first.body["prompt"]) == 8
    assert (first.body["model"], first.body["stream"], first.body["max_tokens"]) == ("fake", True, 4)


def test_requests_are_those_of_the_seed_whatever_the_processes():
    config = make_config("http://h:1", prompt_tokens=Lengths(3, 9), answer_tokens=Lengths(1, 50), vocab_size=500)
    bodies = [json.loads(Workload(config, ACCEPTED).body(number)) for number in range(40)]
    assert bodies == [json.loads(Workload(config, ACCEPTED).body(number)) for number in range(40)]
    assert {len(body["prompt"]) for body in bodies} == set(range(3, 10))
    assert {min(body["prompt"]) >= 100 and max(body["prompt"]) < 500 for body in bodies} == {True}
    assert len({body["max_tokens"] for body in bodies}) > 10
    other = Workload(make_config("http://h:1", seed=1), ACCEPTED).body(0)
    assert json.loads(other)["prompt"] != json.loads(Workload(make_config("http://h:1"), ACCEPTED).body(0))["prompt"]


async def cut_by_bytes(asked, writer):
    """Each byte in a packet of its own, chunks of five bytes that split events, then a closed connection."""
    data = b"".join(event(text_chunk("ä", **usage_of(8, n))) for n in (1, 2, 4)) + event(b"[DONE]")
    wire = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    wire += b"".join(chunked(data[at : at + 5]) for at in range(0, len(data), 5)) + END
    for at in range(0, len(wire), 50):
        writer.write(wire[at : at + 50])
        await writer.drain()
        await asyncio.sleep(0)
    raise ConnectionError


def test_any_chunking_and_no_keep_alive():
    with serve(cut_by_bytes) as server:
        records = run(make_config(server.url, num_requests=5))
        assert server.num_connections == 5
    assert kinds(records) == [None] * 5
    assert {(record.output_tokens, sum(record.counts)) for record in records} == {(4, 4)}


async def closes_idle_connections(asked, writer):
    """Closes each connection after an answer without saying so beforehand."""
    await polite(asked, writer)
    await writer.drain()
    await asyncio.sleep(0.02)
    raise ConnectionError


async def drops_second_request(asked, writer):
    """Closes a connection when its second request arrives, like a server whose keep-alive time is just over."""
    if asked.place:
        raise ConnectionError
    await polite(asked, writer)


@rows("answer", closes_idle_connections, drops_second_request)
def test_a_request_on_a_connection_that_idled_too_long_is_sent_again(answer):
    with serve(answer) as server:
        records = run(make_config(server.url, concurrency=1, num_requests=4))
    assert kinds(records) == [None] * 4


def sick(kind):
    async def answer(asked, writer):
        if kind == "busy":
            writer.write(whole({"error": {"message": "the queue is full"}}, 429))
        elif kind == "html":
            writer.write(b"HTTP/1.1 502 x\r\nContent-Length: 6\r\n\r\n<html>")
        elif kind == "hang":
            writer.write(STREAM_HEAD + chunked(event(text_chunk("a", **usage_of(8, 1)))))
            await writer.drain()
            await asyncio.sleep(60)
        elif kind == "dead":
            raise ConnectionError
        elif kind == "torn":
            writer.write(STREAM_HEAD + chunked(event(text_chunk("a"))))
            raise ConnectionError
        elif kind == "cut":
            writer.write(STREAM_HEAD + chunked(event(text_chunk("a"))) + END)
        elif kind == "error":
            writer.write(STREAM_HEAD + chunked(event({"error": {"message": "no"}})) + END)
        elif kind == "garbage":
            writer.write(b"hello\r\n\r\n")
        elif kind == "not a stream":
            writer.write(whole({"choices": [{"text": "x"}]}))

    return answer


@rows(
    "kind, error, detail",
    ("busy", "HTTP 429", "the queue is full"),
    ("html", "HTTP 502", "<html>"),
    ("hang", "timeout", "within 0.3 s"),
    ("dead", "disconnected", "closed the connection"),
    ("torn", "disconnected", "closed the connection"),
    ("cut", "cut short", "without a finish_reason"),
    ("error", "error in stream", "no"),
    ("garbage", "bad response", "status line"),
    ("not a stream", "cut short", "without [DONE]"),
)
def test_failures_have_a_kind(kind, error, detail):
    with serve(sick(kind)) as server:
        records = run(make_config(server.url, concurrency=2, num_requests=4, timeout_s=0.3))
    assert kinds(records) == [error] * 4
    assert all(detail in record.detail for record in records)
    assert not any(record.is_cut for record in records)


def test_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert kinds(run(make_config(url, num_requests=3))) == ["cannot connect"] * 3
        with pytest.raises(BenchError, match=f"{url}: cannot connect"):
            asyncio.run(probe(make_config(url)))


def endless(pause_s):
    async def answer(asked, writer):
        writer.write(STREAM_HEAD)
        for number in range(1, 10_000):
            writer.write(chunked(event(text_chunk("a", **usage_of(8, number)))))
            await writer.drain()
            await asyncio.sleep(pause_s)

    return answer


def test_answers_that_still_run_after_the_seconds_are_cut_and_their_tokens_count():
    with serve(endless(0.005)) as server:
        start_s = time.monotonic()
        records = run(make_config(server.url, num_requests=None, seconds=0.4))
        assert 0.35 < time.monotonic() - start_s < 2
    assert len(records) == 3
    for record in records:
        assert record.is_cut
        assert record.error is None
        assert record.output_tokens == sum(record.counts) > 5


def test_requests_end_a_run_before_its_seconds():
    with serve(polite) as server:
        start_s = time.monotonic()
        assert len(run(make_config(server.url, seconds=30.0))) == 10
        assert time.monotonic() - start_s < 10


def test_arrivals_do_not_wait_for_answers_and_count_from_when_they_were_due():
    async def slow(asked, writer):
        await asyncio.sleep(0.3)
        await polite(asked, writer)

    with serve(slow) as server:
        records = run(make_config(server.url, request_rate=200.0, num_requests=40))
        assert server.num_connections > 20  # closed loops would be at most `concurrency`
    assert kinds(records) == [None] * 40
    starts = [record.start_s for record in records]
    assert starts == sorted(starts)
    assert 0.05 < starts[-1] - starts[0] < 0.6  # 0.2 s expected
    assert all(record.times[0] - record.start_s >= 0.3 for record in records)
    gaps = {round(second - first, 6) for first, second in itertools.pairwise(starts)}
    assert len(gaps) > 30  # random, not even


def test_processes_share_the_requests_and_the_rate():
    with serve(polite) as server:
        config = make_config(server.url, concurrency=5, processes=2, num_requests=9)
        parts = [run(config, share=Share(index, 2)) for index in range(2)]
    assert [len(part) for part in parts] == [5, 4]
    prompts = {tuple(asked.body["prompt"]) for asked in server.posts}
    assert len(prompts) == 9
    one_process = Workload(config, ACCEPTED)
    assert prompts == {tuple(json.loads(one_process.body(number))["prompt"]) for number in range(9)}


def choosy(*, takes_ids=True, options=2):
    """Refuses ids, and stream options beyond the given number of them, as other servers do."""

    async def answer(asked, writer):
        body = asked.body or {}
        if isinstance(body.get("prompt"), list) and not takes_ids:
            writer.write(whole({"error": {"message": "prompt must be text"}}, 422))
        elif len(body.get("stream_options") or {}) > options:
            writer.write(whole({"error": {"message": "unknown field"}}, 400))
        else:
            await polite(asked, writer)

    return answer


@rows("options, counting", (2, "per chunk"), (1, "usage"), (0, "chunks"))
@rows("takes_ids", True, False)
@rows("endpoint", "completions", "chat")
def test_the_probe_finds_what_the_server_takes(endpoint, takes_ids, options, counting):
    with serve(choosy(takes_ids=takes_ids, options=options)) as server:
        config = make_config(server.url + "/v1/", endpoint=endpoint, num_requests=2, prompt_tokens=Lengths(101, 101))
        accepted = asyncio.run(probe(config))
        records = run(config, accepted)
    assert (accepted.model, accepted.server_version) == ("fake", "9.9")
    assert accepted.takes_ids == (takes_ids and endpoint == "completions")
    assert len(accepted.stream_options or {}) == options
    assert kinds(records) == [None] * 2
    assert {(record.output_tokens, record.counting) for record in records} == {(4, counting)}
    if options:  # else nothing says how long a text is
        expected = 101 if endpoint == "chat" or accepted.takes_ids else 100  # two tokens a word
        assert {record.prompt_tokens for record in records} == {expected}


@rows("takes_ids", True, False)
def test_the_probe_asks_for_one_token_whatever_the_run_asks_for(takes_ids):
    """Servers refuse more `min_tokens` than `max_tokens`."""
    extra_body = {"min_tokens": 8, "temperature": 0}
    with serve(choosy(takes_ids=takes_ids)) as server:
        config = make_config(server.url, num_requests=1, extra_body=extra_body, answer_tokens=Lengths(8, 8))
        accepted = asyncio.run(probe(config))
        probes = [asked.body for asked in server.posts]
        assert kinds(run(config, accepted)) == [None]
        sent = server.posts[-1].body
    assert all("min_tokens" not in body for body in probes)
    assert {(body["temperature"], body["max_tokens"]) for body in probes} == {(0, 1)}
    assert extra_body.items() <= sent.items()


def test_the_probe_does_not_wait_for_ever():
    async def silent(asked, writer):
        await asyncio.sleep(60)

    with serve(silent) as server, pytest.raises(BenchError, match=r"timeout: no complete answer within 0\.2 s"):
        asyncio.run(probe(make_config(server.url, timeout_s=0.2)))


def test_the_probe_says_why_nothing_works():
    async def refuses(asked, writer):
        writer.write(whole({"error": {"message": "ignore_eos: not supported"}}, 400))

    async def locked(asked, writer):
        writer.write(whole({"error": {"message": "no key"}}, 401))

    with serve(refuses) as server, pytest.raises(BenchError, match="every kind of request: ignore_eos: not supported"):
        asyncio.run(probe(make_config(server.url, model="m", ignore_eos=True)))
    with serve(locked) as server:
        with pytest.raises(BenchError, match="HTTP 401: no key"):
            asyncio.run(probe(make_config(server.url, model="m")))
        with pytest.raises(BenchError, match="GET /v1/models answers HTTP 401: no key"):
            asyncio.run(probe(make_config(server.url)))


def test_a_dataset_is_sent_once_through_before_it_repeats(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"question {i}"} for i in range(4)] + [{"prompt": [7, 8], "max_tokens": 2}]
    lengths = Lengths(3, 3)
    rows[0]["prompt"] += "\u2028\u2029\x85"  # ends a line for str.splitlines, not in JSON lines
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    with serve(polite) as server:
        run(make_config(server.url, dataset=file, answer_tokens=lengths, extra_body={"temperature": 0}))
    sent = [json.dumps(asked.body["prompt"]) for asked in server.posts]
    assert len(sent) == 10
    assert sorted(sent[:5]) == sorted(json.dumps(row["prompt"]) for row in rows)
    assert sorted(sent[5:]) == sorted(sent[:5])
    assert {(asked.body["temperature"], asked.body["max_tokens"]) for asked in server.posts} == {(0, 3), (0, 2)}


@rows(
    "text, endpoint, words",
    ("", "chat", "has no lines"),
    ("{oops", "chat", "line 1"),
    ('{"prompt": "a"}\n[]', "chat", "line 2: each line must be a JSON object"),
    ('{"prompt": "a", "messages": []}', "chat", "either prompt or messages"),
    ('{"messages": []}', "completions", "messages go to --endpoint chat"),
    ('{"prompt": [1]}', "chat", "token ids goes to --endpoint completions"),
    ('{"prompt": "a"}\n{"prompt": "\\ud800"}', "chat", "line 2: .*surrogates"),
    ('{"prompt": "a", "max_tokens": 1%s}' % ("0" * 23), "chat", "line 1: Integer exceeds"),
    ('{"prompt": "a", "max_tokens": NaN}', "chat", "line 1: NaN is not JSON"),
    (None, "chat", "cannot be read"),
)
def test_refusals_of_a_dataset(tmp_path, text, endpoint, words):
    file = tmp_path / "rows.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BenchError, match=words):
        Workload(make_config("http://h:1", dataset=file, endpoint=endpoint), ACCEPTED)


def test_texts_of_a_dataset_become_chats(tmp_path):
    file = tmp_path / "rows.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"messages": messages}))
    workload = Workload(make_config("http://h:1", dataset=file, endpoint="chat"), ACCEPTED)
    sent = [json.loads(workload.body(number))["messages"] for number in range(2)]
    assert sorted(sent, key=len) == [[{"role": "user", "content": "a"}], messages]
