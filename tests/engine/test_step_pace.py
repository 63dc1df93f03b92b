"""The time of a step is bounded while streams decode (G84). Devices are models of time; nothing here reads a clock."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineConfigError
from engine.executor import LaunchedStep
from engine.step_pace import MIN_PROMPT_TOKENS, StepPace
from tests.engine.fakes import FakeModel
from tests.engine.requests import request
from tests.tables import rows

CPU = {"decode_s": 0.014, "fixed_s": 0.005, "token_s": 0.0008}
SLOW = {"decode_s": 0.5, "fixed_s": 0.1, "token_s": 0.01}


def run_steps(pace, count, *, decode_s, fixed_s, token_s):
    """Times of steps that decode and read prompts, each as many tokens as the pace says."""
    pace.observe(num_decodes=4, num_prompt_tokens=0, step_s=decode_s)
    times = []
    for _ in range(count):
        num_tokens = pace.max_prompt_tokens
        times.append(decode_s + fixed_s + num_tokens * token_s)
        pace.observe(num_decodes=4, num_prompt_tokens=num_tokens, step_s=times[-1])
    return times


@rows("first_guess_s", 1e-5, 0.0008, 0.1)
def test_steps_come_near_the_target_whatever_was_measured_first_g84(first_guess_s):
    times = run_steps(StepPace(0.06, first_guess_s), 40, **CPU)
    assert all(0.03 < step_s <= 0.06 for step_s in times[10:])


def test_prompts_may_take_as_long_as_decoding_does_g84():
    """Decoding alone takes eight times the target: prompts get as much time as decoding, not the minimum."""
    times = run_steps(StepPace(0.06, 0.001), 40, **SLOW)
    assert all(0.8 < step_s <= 1.1 for step_s in times[10:])
    pace = StepPace(0.06, 0.001)
    pace.observe(num_decodes=4, num_prompt_tokens=0, step_s=0.5)
    assert pace.max_prompt_tokens == 480
    pace = StepPace(0.06, 0.001)
    pace.observe(num_decodes=4, num_prompt_tokens=0, step_s=0.01)
    assert pace.max_prompt_tokens == 32, "50 fit, and a multiple of 32 is taken"


def test_a_step_without_decodes_spends_all_its_time_on_prompts_g84():
    pace = StepPace(1.0, 0.001)
    pace.observe(num_decodes=4, num_prompt_tokens=0, step_s=0.1)
    pace.observe(num_decodes=0, num_prompt_tokens=600, step_s=1.2)
    assert pace.max_prompt_tokens == 576, "0.9 s of 1.5 ms a token"


def test_the_short_end_of_a_prompt_does_not_shrink_later_steps():
    """27 ms of such a step are for launching it, with 30 tokens as with 2,000."""
    launched_one_by_one = {"decode_s": 0.004, "fixed_s": 0.027, "token_s": 0.000015}
    pace = StepPace(0.06, 0.00003)
    run_steps(pace, 30, **launched_one_by_one)
    usual = pace.max_prompt_tokens
    for _ in range(20):
        pace.observe(num_decodes=4, num_prompt_tokens=30, step_s=0.0315)
    assert pace.max_prompt_tokens == usual > 1500
    pace.observe(num_decodes=4, num_prompt_tokens=30, step_s=0.09)
    assert pace.max_prompt_tokens < usual, "longer than the target: fewer tokens might help"


def test_one_step_that_was_held_up_is_forgotten_g84():
    pace = StepPace(0.06, 0.001)
    usual = run_steps(pace, 20, **CPU)[-1]
    pace.observe(num_decodes=4, num_prompt_tokens=32, step_s=20.0)
    assert pace.max_prompt_tokens == MIN_PROMPT_TOKENS
    assert run_steps(pace, 100, **CPU)[-1] == pytest.approx(usual, rel=0.3)


def test_a_step_that_takes_no_time_is_survived():
    pace = StepPace(0.06, 0.001)
    for _ in range(50):
        pace.observe(num_decodes=4, num_prompt_tokens=32, step_s=1e-9)
        pace.observe(num_decodes=4, num_prompt_tokens=0, step_s=1e-9)
    assert pace.max_prompt_tokens > MIN_PROMPT_TOKENS


class TimedModel(FakeModel):
    """A model whose steps take, on a clock of its own, as long as their tokens are many."""

    def __init__(self):
        super().__init__(max_model_len=4000)
        self.now_s = 0.0

    def __call__(self, batch, plan, kv):
        self.now_s += CPU["decode_s"] + batch.num_tokens * CPU["token_s"]
        return super().__call__(batch, plan, kv)


def step_times(max_step_ms):
    """Times of the steps in which a stream decodes while a long prompt is read; then of a prompt alone."""
    model = TimedModel()
    config = EngineConfig(
        model=Path("unused"), device="cpu", num_pages=1000, max_num_batched_tokens=512, max_step_ms=max_step_ms
    )
    core = EngineCore(config, model, clock=lambda: model.now_s)
    core.add(request("alone", [5] * 900, 1, ignore_eos=True))
    alone = timed_steps(core, model, "alone")
    core.add(request("stream", [1], 500, ignore_eos=True))
    for _ in range(5):
        core.step()
    core.add(request("prompt", [7] * 1500, 1, ignore_eos=True))
    return timed_steps(core, model, "prompt"), alone


def timed_steps(core, model, name):
    times, outputs = [], []
    while all(output.request_id != name for output in outputs):
        start_s = model.now_s
        outputs = core.step()
        times.append(model.now_s - start_s)
    return times


def test_a_stream_does_not_stutter_while_a_prompt_is_read_g84():
    together, alone = step_times(60)
    assert max(together[5:]) <= 0.06
    assert len(alone) == 2, "nobody waits: full chunks"
    together, _ = step_times(0)
    assert max(together) > 0.4, "0 switches it off"


class RecordingPace:
    """Bounds nothing and keeps what it is told."""

    max_prompt_tokens = 1000

    def __init__(self):
        self.observed = []

    def observe(self, *, num_decodes, num_prompt_tokens, step_s):
        self.observed.append((num_decodes, num_prompt_tokens))


def test_only_steps_that_gave_a_token_are_timed_g84():
    """On a GPU a step without one has only been launched when the clock is read."""
    config = EngineConfig(model=Path("unused"), device="cpu", num_pages=100, max_num_batched_tokens=100)
    core = EngineCore(config, FakeModel(max_model_len=400))
    core._pace = RecordingPace()
    core.add(request("a", [5] * 150, 9, ignore_eos=True))
    core.step()
    assert core._pace.observed == []
    core.step()
    core.step()
    core.add(request("b", [6] * 40, 9, ignore_eos=True))
    core.step()
    assert core._pace.observed == [(0, 50), (1, 0), (1, 40)]


def test_a_negative_time_is_refused():
    with pytest.raises(EngineConfigError, match="max_step_ms is -1"):
        EngineConfig(model=Path("unused"), max_step_ms=-1)


class SimulatedDevice:
    """Works through what is launched, one pass after the other, while the host goes on; both share a clock."""

    pass_s, host_s = 0.010, 0.002

    def __init__(self):
        self.now_s = self.free_s = 0.0

    def launch(self):
        self.free_s = max(self.now_s, self.free_s) + self.pass_s

    def mark(self, device):
        return SimulatedMark(self)


class SimulatedMark:
    def __init__(self, simulated):
        self.simulated, self.passed_s = simulated, simulated.free_s

    def wait(self):
        self.simulated.now_s = max(self.simulated.now_s, self.passed_s)


class SimulatedModel(FakeModel):
    """Its host work is done before a pass is launched."""

    def __init__(self, simulated):
        super().__init__()
        self.simulated = simulated

    def __call__(self, batch, plan, kv):
        self.simulated.now_s += self.simulated.host_s
        self.simulated.launch()
        return super().__call__(batch, plan, kv)


@rows("overlap, step_s", (False, 0.012), (True, 0.010))
def test_a_step_takes_as_long_as_the_device_needs_and_the_host_is_hidden(monkeypatch, overlap, step_s):
    """The time between two steps is what streams see; a launch that waits behind another pass does not count twice."""
    simulated = SimulatedDevice()
    monkeypatch.setattr("engine.runner.Mark", simulated.mark)
    config = EngineConfig(model=Path("unused"), device="cpu", num_pages=100, overlap=overlap)
    core = EngineCore(config, SimulatedModel(simulated), clock=lambda: simulated.now_s)
    times = []

    class Pace(RecordingPace):
        def observe(self, *, num_decodes, num_prompt_tokens, step_s):
            times.append(step_s)

    core._pace = Pace()
    core.add(request("a", [5] * 10, 20, ignore_eos=True))
    start_s = simulated.now_s = simulated.free_s = 100.0
    while core.has_work:
        core.step()
    assert len(times) == 20
    assert times[1:] == pytest.approx([step_s] * 19)
    assert simulated.now_s - start_s == pytest.approx(20 * step_s + (0.002 if overlap else 0))


@pytest.mark.parametrize(
    ("own", "of_the_largest_rank", "want"),
    [([1, 1, 30], 0, 30), ([1, 1, 30], 20, 30), ([1, 1, 30], 500, 498), ([1] * 4, 500, 496), ([1] * 4, 0, 0)],
)
def test_ranks_count_the_prompts_of_the_rank_that_all_wait_for(own, of_the_largest_rank, want):
    """A rank with 30 tokens beside one with 500 would otherwise take its tokens for slow, and read fewer and fewer."""
    chunks = [SimpleNamespace(num_tokens=num_tokens) for num_tokens in own]
    launched = LaunchedStep(chunks, 0.0, None, max_rank_tokens=of_the_largest_rank)
    assert launched.num_prompt_tokens == want
    assert launched.num_decodes == own.count(1)
