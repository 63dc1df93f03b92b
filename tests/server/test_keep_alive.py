"""A stream that has nothing to send says so now and then, in each API's way, and stays the same answer."""

import json

import pytest

from server import respond
from tests.server.conftest import ANSWER, FakeEngine, serve
from tests.tables import rows

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = {"messages": QUESTION}
COMMENT, PING = ": keep-alive", "event: ping"


@pytest.fixture(scope="module")
def service(tokenizer):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(respond, "KEEP_ALIVE_S", 0.1)
        with serve(FakeEngine(), tokenizer) as service:
            yield service


@rows(
    "path, fields, sign, num_begun",  # events that come before the first sign of life
    ("chat/completions", CHAT, COMMENT, 0),
    ("chat/completions", {**CHAT, "n": 2}, COMMENT, 0),
    ("completions", {"prompt": "Hi", "max_tokens": 50}, COMMENT, 0),
    ("responses", {"input": "Hi"}, COMMENT, 2),
    ("messages", {**CHAT, "max_tokens": 50}, PING, 2),
)
def test_a_silent_stream_is_kept_alive(path, fields, sign, num_begun, service, harmony):
    service.engine.script = lambda _request: [harmony(ANSWER)[:12], harmony(ANSWER)[12:]]
    quick, silent = (lines_of(service, path, fields, delay_s) for delay_s in (0.0, 0.3))
    assert silent.count(sign) > 2  # two silences; one ping comes anyway
    begun = silent[: silent.index(sign)]
    assert len([line for line in begun if line.startswith("data:")]) == num_begun - (sign == PING)
    assert payloads(silent) == payloads(quick)


def lines_of(service, path, fields, delay_s):
    service.engine.delay_s = delay_s
    with service.http() as http:
        answer = http.post(f"/v1/{path}", json={**fields, "stream": True})
    assert answer.status_code == 200
    return [line for line in answer.text.split("\n") if line]


def payloads(lines):
    """What the events say, without pings, and without what is new each time."""
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [shape(each) for each in data if each.get("type") != "ping"]


def shape(value):
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items() if name not in NEW_EACH_TIME}
    return [shape(each) for each in value] if isinstance(value, list) else value


NEW_EACH_TIME = {"id", "item_id", "created", "created_at", "completed_at"}


def test_an_error_after_a_silence_is_an_event(service):
    service.engine.script, service.engine.delay_s = lambda _request: [5], 0.2
    service.engine.last = lambda _request, _num: {"finish_reason": "error", "error": "too hot"}
    lines = lines_of(service, "chat/completions", CHAT, 0.2)
    service.engine.last = None
    assert lines[0] == COMMENT
    assert "too hot" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]


def test_the_first_token_after_a_silence_is_timed_as_the_first(service):
    service.engine.script = lambda _request: [5] * 3
    lines = lines_of(service, "completions", {"prompt": "Hi", "max_tokens": 3, "return_timings": True}, 0.2)
    assert lines[0] == COMMENT
    timings = payloads(lines)[-1]["timings"]
    assert timings["first_token_ms"] > 100  # the first token comes after 200 ms, the last one 400 ms later
    assert timings["decode_ms"] > 200


def test_tokens_keep_a_stream_alive_by_themselves(service, monkeypatch):
    monkeypatch.setattr(respond, "KEEP_ALIVE_S", 0.4)
    service.engine.script = lambda _request: [5] * 50
    lines = lines_of(service, "completions", {"prompt": "Hi", "max_tokens": 50}, 0.02)
    assert COMMENT not in lines
