"""An engine that runs but computes nothing (G10) is not ready, and the log says why; a slow engine is not stalled."""

import msgspec
import pytest

from server.stall import StallWatch
from tests.server.conftest import FakeEngine, one_process_only, serve, wait_until
from tests.tables import rows


class CountingEngine(FakeEngine):
    """Its statistics are what a test sets; the heartbeat stays fresh."""

    counts: dict

    @property
    def stats(self):
        return msgspec.structs.replace(super().stats, **self.counts)


@pytest.fixture
def engine():
    engine = CountingEngine()
    engine.counts = {}
    return engine


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def watch(engine, clock):
    return StallWatch(engine, 60.0, clock=lambda: clock[0])


def test_three_wait_and_none_runs_g10(engine, clock, watch, caplog):
    engine.counts = {"num_waiting": 3, "num_pages_used": 7, "num_pages_total": 8}
    assert watch.check() is None
    clock[0] += 59.9
    assert watch.check() is None
    clock[0] += 0.1
    reason = watch.check()
    assert reason == "the engine stalls: 3 requests wait and 0 run, but no token was computed for 60 s"
    clock[0] += 30
    assert "for 90 s" in watch.check()
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", f"{reason}; 7 of 8 KV pages are in use")


def test_the_end_of_a_stall_is_logged_g10(engine, clock, watch, caplog):
    caplog.set_level("INFO")
    for end in ({"num_waiting": 3, "num_prompt_tokens": 1}, {"num_waiting": 0}):
        engine.counts = {"num_waiting": 3}
        watch.check()
        clock[0] += 61
        assert watch.check()
        engine.counts = end
        assert watch.check() is None
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"] * 2


@rows("counter", "num_prompt_tokens", "num_generated_tokens")
def test_a_slow_engine_does_not_stall_g10(engine, clock, watch, counter):
    """A token a minute is progress, of a prompt too, whoever waits."""
    for count in range(5):
        engine.counts = {"num_waiting": 3, "num_running": 1, counter: count}
        assert watch.check() is None
        clock[0] += 59


def test_running_requests_without_a_token_stall_g10(engine, clock, watch):
    engine.counts = {"num_running": 2, "num_generated_tokens": 5}
    watch.check()
    clock[0] += 60
    engine.counts["num_steps"] = 1000  # it turns, but steps are no tokens
    assert "0 requests wait and 2 run" in watch.check()


def test_an_idle_hour_is_no_stall_g10(engine, clock, watch):
    watch.check()
    clock[0] += 3600
    engine.counts = {"num_waiting": 1}
    assert watch.check() is None


def test_a_dead_engine_is_no_stall_g10(engine, clock, watch, caplog):
    """Its last statistics stay; that it is dead is said elsewhere."""
    engine.counts, engine.ready = {"num_running": 1}, False
    watch.check()
    clock[0] += 61
    assert watch.check() is None
    assert not caplog.records


@one_process_only
def test_a_stalled_service_is_not_ready_g10(engine, tokenizer, caplog):
    with serve(engine, tokenizer, stall_timeout=0.2) as service, service.http() as http:
        assert http.get("/health/ready").status_code == 200
        engine.counts = {"num_waiting": 3}
        wait_until(lambda: "the engine stalls" in caplog.text)  # without a probe
        response = http.get("/health/ready")
        assert response.status_code == 503
        assert response.json()["reason"].startswith("the engine stalls: 3 requests wait and 0 run")
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert http.get("/health/live").status_code == 200
        engine.counts = {}
        assert http.get("/health/ready").status_code == 200
