"""`Retry-After` of a full queue follows the queue's speed (G86)."""

from collections import Counter

import pytest

from server.queue_speed import MAX_RETRY_AFTER_S, QueueSpeed
from tests.server.conftest import MAX_REQUESTS, one_process_only, wait_until
from tests.tables import rows


@rows(
    "freed_s, now_s, expected",
    ([], 5.0, 1),
    ([0.1 * i for i in range(100)], 10.0, 1),
    ([0.0, 10.0, 20.0, 30.0], 40.0, 10),
    ([0.0], 7.5, 8),
    ([0.0, 100.0], 119.0, 60),
    ([0.0], 119.0, MAX_RETRY_AFTER_S),
    ([0.0], 500.0, 1),  # too long ago
    ([0.0, 495.0], 500.0, 5),
)
def test_the_mean_gap_is_told_within_bounds_g86(freed_s, now_s, expected):
    speed = QueueSpeed()
    for moment_s in freed_s:
        speed.on_free(1, moment_s)
    assert speed.retry_after_s(now_s) == expected


def test_places_that_come_free_together_count_each_g86():
    speed = QueueSpeed()
    speed.on_free(10, 0.0)
    assert speed.retry_after_s(50.0) == 5


@pytest.fixture
def slow_queue(service, monkeypatch):
    gate = service.app.state.context.gate
    monkeypatch.setattr(gate, "_speed", QueueSpeed())
    monkeypatch.setattr(gate._speed, "retry_after_s", lambda _now_s: 17)
    return service


def test_a_queue_that_the_server_sees_full_tells_when_g86(slow_queue, monkeypatch):
    gate = slow_queue.app.state.context.gate
    with slow_queue.http() as http:
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        client = slow_queue.engine.requests.pop().client
        monkeypatch.setattr(type(gate), "num_by_client", Counter({client: MAX_REQUESTS}))
        response = http.post("/v1/completions", json={"prompt": "a"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "17")
    assert not slow_queue.engine.requests


def test_a_queue_full_of_another_clients_requests_lets_a_newcomer_through(slow_queue, monkeypatch):
    """The engine gives it a place; it would not, if the request needed more than half of them."""
    gate = slow_queue.app.state.context.gate
    monkeypatch.setattr(type(gate), "num_by_client", Counter({"somebody else": MAX_REQUESTS}))
    with slow_queue.http() as http:
        for num_choices, status in ((MAX_REQUESTS // 2, 200), (MAX_REQUESTS // 2 + 1, 429)):
            fields = {"prompt": "a", "n": num_choices, "max_tokens": 1}
            assert http.post("/v1/completions", json=fields).status_code == status


@one_process_only
@rows("stream", False, True)
def test_a_queue_that_the_engine_finds_full_tells_when_g86(slow_queue, stream):
    slow_queue.engine.last = lambda _request, _count: {"finish_reason": "error", "error": "full", "overloaded": True}
    with slow_queue.http() as http:
        response = http.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (429, "17")
    assert not slow_queue.app.state.context.gate._speed._freed_s, "who was refused had no place to free"


@one_process_only
def test_ended_requests_of_every_kind_free_their_places_g86(service):
    freed = service.app.state.context.gate._speed._freed_s
    before = len(freed)
    service.engine.script = lambda _request: [5]
    with service.http() as http:
        http.post("/v1/completions", json={"prompt": "a", "n": 3})
    wait_until(lambda: len(freed) == before + 3)
