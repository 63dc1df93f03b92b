"""The engine loop announces every turn, so a prefill of a minute, in many steps, does not look dead."""

import logging
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.messages import WorkerSetup
from engine.worker import Worker


class Diary:
    """Stands in for the heartbeat and for the core; writes down in what order they are called."""

    def __init__(self, num_busy_steps, idle_turns=0):
        self.entries = []
        self.num_busy_steps = num_busy_steps
        self.idle_turns = idle_turns

    def turn(self):
        self.entries.append("turn")

    @property
    def has_work(self):
        return self.num_busy_steps > 0 and self.idle_turns == 0

    def step(self):
        self.entries.append("step")
        self.idle_turns = max(0, self.idle_turns - 1)
        self.num_busy_steps -= 1
        if self.num_busy_steps < 0:
            raise StopIteration
        return []


@pytest.fixture
def worker(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.worker._IDLE_WAIT_MS", 1)
    # An audit hook stays until its process ends, and slows all later tests.
    monkeypatch.setattr("engine.worker.CompileWatch.begin", lambda watch: None)
    setup = WorkerSetup(
        config=EngineConfig(model=Path("unused")),
        requests_address=f"ipc://{tmp_path}/r",
        outputs_address=f"ipc://{tmp_path}/o",
        log_level=logging.WARNING,
    )
    worker = Worker(setup)
    yield worker
    worker._context.destroy(linger=0)


def serve(worker, diary):
    worker._heartbeat = diary
    with pytest.raises(StopIteration):
        worker._serve(diary)
    return diary.entries


def test_a_busy_loop_announces_each_turn_before_its_step(worker):
    """Steps of a long prompt produce no output, so only this shows that the loop runs; the first step counts too."""
    entries = serve(worker, Diary(num_busy_steps=3))
    assert entries[:6] == ["turn", "step"] * 3


def test_an_idle_loop_announces_the_end_of_its_wait_too(worker):
    """Otherwise the heartbeat's age at the next step would include the wait."""
    entries = serve(worker, Diary(num_busy_steps=1, idle_turns=1))
    assert entries[:3] == ["turn", "turn", "step"]


def test_loading_is_no_turn(worker):
    """The time since the process began must not count once the model is loaded: a load of minutes would look dead."""
    calls = []

    class Core:
        info = None

    def send(message):
        calls.append(type(message).__name__)
        raise KeyError("the end of this test")

    worker._send = send
    worker._heartbeat.turn = lambda: calls.append("turn")
    worker._heartbeat.start = worker._heartbeat.end = lambda: None
    with pytest.raises(KeyError):
        worker.run(lambda _setup, _phases: Core())
    assert calls[:2] == ["turn", "Ready"]
