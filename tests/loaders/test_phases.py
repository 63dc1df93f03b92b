"""Phases of a start: whose time is whose, what is counted, and what is logged when."""

import logging

import pytest

from loaders.phases import Phase, PhaseTime, StartPhases


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def phases(clock):
    return StartPhases(clock)


def seconds(phases):
    return {each.phase: each.seconds for each in phases.progress().phases}


def test_time_inside_an_inner_phase_is_not_the_outer_ones(phases, clock):
    clock.now_s += 1
    with phases.phase(Phase.WEIGHTS, total=2):
        for _ in range(2):
            clock.now_s += 10
            with phases.step_of(Phase.PROCESSING, 2):
                clock.now_s += 3
                with phases.step_of(Phase.SELF_CHECK, 2):
                    clock.now_s += 5
            phases.advance(Phase.WEIGHTS)
    assert seconds(phases) == {"starting": 1, "loading weights": 20, "processing weights": 6, "self-check": 10}
    phases.finish()
    progress = phases.progress()
    assert (progress.phase, progress.elapsed_s) == ("ready", 37)
    assert sum(each.seconds for each in progress.phases) == 37
    clock.now_s += 100
    assert phases.progress().elapsed_s == 37


def test_progress_shows_the_phase_that_runs_with_its_steps_and_its_time_so_far(phases, clock):
    assert (phases.progress().phase, phases.progress().total) == ("starting", 0)
    with phases.phase(Phase.WEIGHTS, total=24):
        phases.advance(Phase.WEIGHTS, 7, num_bytes=2**30)
        clock.now_s += 2
        progress = phases.progress()
        assert (progress.phase, progress.done, progress.total, progress.elapsed_s) == ("loading weights", 7, 24, 2)
        assert progress.phases[-1] == PhaseTime(
            phase="loading weights", seconds=2, done=7, total=24, num_bytes=2**30, hidden_s=0
        )
        assert progress.phases[-1].bytes_per_s == 2**29
        with phases.step_of(Phase.SELF_CHECK, 24):
            progress = phases.progress()
            assert (progress.phase, progress.done, progress.total) == ("self-check", 0, 24)
        assert phases.progress().phase == "loading weights"


def test_each_finished_phase_is_one_line_and_ready_sums_them_up(phases, clock, caplog):
    caplog.set_level(logging.INFO, "loaders.phases")
    with phases.phase(Phase.WEIGHTS, total=2):
        for _ in range(2):
            with phases.step_of(Phase.SELF_CHECK, 2):
                clock.now_s += 1.5
            clock.now_s += 0.5
            phases.advance(Phase.WEIGHTS)
        phases.advance(Phase.WEIGHTS, 0, num_bytes=6 * 2**30, hidden_s=2.0)
        assert caplog.messages == ["self-check 3.0 s (2 of 2)"]
    weights = "loading weights 1.0 s (2 of 2, 6.00 GiB at 2.00 GiB/s, 2.0 s more beside other phases)"
    assert caplog.messages[1:] == [weights]
    phases.finish()
    assert caplog.messages[2:] == [f"ready after 4.0 s: starting 0.0 s, {weights}, self-check 3.0 s (2 of 2)"]


def test_a_phase_that_fails_is_left_and_not_logged_as_finished(phases, caplog):
    caplog.set_level(logging.INFO, "loaders.phases")
    with pytest.raises(KeyError), phases.phase(Phase.HEADERS):
        raise KeyError("damaged")
    with pytest.raises(KeyError), phases.step_of(Phase.SELF_CHECK, 1):
        raise KeyError("wrong")
    assert phases.progress().phase == "starting"
    assert caplog.messages == []
