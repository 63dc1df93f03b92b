"""Times of requests: in the engine's queue, prefill, between tokens; by hand-set clocks, never the wall's."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.types import EngineOutput
from server.answer_watch import AnswerWatch
from server.metrics import Metrics
from server.renderers.base import TokenCounts
from server.stall import StallReason, StallWatch
from server.tally import OwnTally
from tests.engine.fakes import FakeModel
from tests.engine.requests import request
from tests.server.conftest import FakeEngine
from tests.tables import rows


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@rows("overlap", False, True)
def test_the_engine_tells_queue_and_prefill_with_the_first_token_only(overlap):
    clock = Clock()
    config = EngineConfig(
        model=Path("unused"), device="cpu", page_size=4, num_pages=64, max_num_seqs=1, max_num_batched_tokens=4,
        overlap=overlap, max_step_ms=0,
    )  # fmt: skip
    core = EngineCore(config, FakeModel(eos_token_ids=()), clock=clock)
    core.add(request("first", range(1, 11), max_tokens=3))  # three steps of prompt
    core.add(request("second", range(1, 3), max_tokens=2))
    outputs = []
    while core.has_work:
        outputs += core.step()
        clock.now_s += 1
    times = [(each.request_id, each.queue_s, each.prefill_s) for each in outputs]
    late = int(overlap)  # a step is collected by the call after the one that launches it
    first, second = times[0], times[3]
    assert first == ("first", 0.0, 2.0 + late)
    assert (second[0], second[2]) == ("second", 0.0 + late)
    assert second[1] == pytest.approx(5.0, abs=late)  # three steps of prompt and two more tokens
    assert [each[1:] for each in times if each not in (first, second)] == [(None, None)] * 3


@dataclass
class Answer:
    """What `AnswerWatch` asks of a renderer."""

    num_choices: int = 1
    model: str = "m"
    counts: TokenCounts = field(default_factory=lambda: TokenCounts(7, 0, 5, 0))

    @property
    def choices(self):
        return [SimpleNamespace(finish_reason="stop", num_undeclared_calls=0, is_empty=False)] * self.num_choices

    @property
    def prepared(self):
        return SimpleNamespace(requests=[request(str(index), [1], max_tokens=9) for index in range(self.num_choices)])


@pytest.fixture
def metrics():
    return Metrics(lambda: None, lambda: None, OwnTally())


def news(*indices, **first):
    return [(index, EngineOutput(request_id=str(index), token_ids=[5], **first)) for index in indices]


def histogram(metrics, name):
    """Count and sum of a histogram; (0, 0) if nothing was observed."""
    text = metrics.text().decode()
    values = {
        line.split("{")[0].removeprefix(f"moe_serve_{name}_"): float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith((f"moe_serve_{name}_count{{", f"moe_serve_{name}_sum{{"))
    }
    return values.get("count", 0.0), values.get("sum", 0.0)


def test_each_token_after_the_first_is_one_gap(metrics):
    clock = Clock()
    watch = AnswerWatch(metrics, Answer(), clock)
    clock.now_s += 2
    watch.on_news(news(0, queue_s=0.5, prefill_s=1.25))
    for gap_s in (0.25, 0.5):
        clock.now_s += gap_s
        watch.on_tokens(news(0))
    clock.now_s += 3  # three steps that come together
    watch.on_news(news(0, 0, 0))
    clock.now_s += 0.5  # the last output, without a token
    watch.on_tokens([(0, EngineOutput(request_id="0", finish_reason="stop"))])
    watch.on_end()
    assert histogram(metrics, "time_to_first_token_seconds") == (1, 2.0)
    assert histogram(metrics, "queue_seconds") == (1, 0.5)
    assert histogram(metrics, "prefill_seconds") == (1, 1.25)
    assert histogram(metrics, "inter_token_seconds") == (5, 3.75)
    assert histogram(metrics, "decode_seconds") == (1, 4.25)
    assert histogram(metrics, "inference_seconds") == (1, 5.5)
    assert histogram(metrics, "request_seconds") == (1, 6.25)
    assert histogram(metrics, "seconds_per_token") == (1, 4.25 / 4)
    assert histogram(metrics, "request_prompt_tokens") == (1, 7)
    assert histogram(metrics, "request_generated_tokens") == (1, 5)
    assert histogram(metrics, "request_max_tokens") == (1, 9)


def test_gaps_of_single_tokens_are_observed_together_a_second_late_at_most(metrics):
    clock = Clock()
    watch = AnswerWatch(metrics, Answer(), clock)
    counts = []
    with watch:
        watch.on_news(news(0))
        for gap_s in (0.25, 0.5, 0.5, 0.125):
            clock.now_s += gap_s
            watch.on_token(5, clock.now_s)
            counts.append(histogram(metrics, "inter_token_seconds"))
    assert counts == [(0, 0), (0, 0), (3, 1.25), (3, 1.25)]
    assert histogram(metrics, "inter_token_seconds") == (4, 1.375)


def test_choices_of_one_step_wait_the_same_time(metrics):
    clock = Clock()
    watch = AnswerWatch(metrics, Answer(num_choices=3), clock)
    watch.on_news(news(0, 1, 2, queue_s=1.0, prefill_s=2.0))
    clock.now_s += 0.5
    watch.on_news(news(0, 1, 2))
    assert histogram(metrics, "queue_seconds") == (3, 3.0)
    assert histogram(metrics, "inter_token_seconds") == (3, 1.5)
    assert watch.queue_s == 1.0


def test_a_step_costs_one_observation_however_many_choices_it_serves(metrics, monkeypatch):
    watch = AnswerWatch(metrics, Answer(num_choices=8), Clock())
    watch.on_news(news(*range(8)))
    calls = []
    monkeypatch.setattr(OwnTally, "add", lambda _self, key, amount: calls.append((key, amount)))
    watch.on_news(news(*range(8)))
    assert len(calls) == 2  # bucket and sum


class Counting(FakeEngine):
    counts: dict

    @property
    def stats(self):
        return msgspec.structs.replace(super().stats, **self.counts)


@rows(
    "counts, reason",
    ({"num_waiting": 2, "num_pages_used": 8, "num_pages_total": 8}, StallReason.NO_PAGES),
    ({"num_waiting": 2, "num_pages_used": 7, "num_pages_total": 8}, StallReason.NOT_ADMITTED),
    ({"num_waiting": 2, "num_running": 1, "num_pages_used": 8, "num_pages_total": 8}, StallReason.NO_TOKEN),
)
def test_what_holds_requests_up_is_a_bounded_label(counts, reason):
    engine, clock = Counting(), Clock()
    engine.counts = counts
    stall = StallWatch(engine, 60.0, clock)
    metrics = Metrics(lambda: engine.stats, lambda: None, OwnTally(), stall)
    stall.check()
    clock.now_s += 12
    shown = metrics.text().decode()
    for each in StallReason:
        assert f'moe_serve_stall_seconds{{reason="{each}"}} {12.0 if each is reason else 0.0}' in shown
    engine.counts = counts | {"num_generated_tokens": 1}
    assert f'moe_serve_stall_seconds{{reason="{reason}"}} 0.0' in metrics.text().decode()
    engine.counts = {}
    clock.now_s += 12
    assert stall.waiting_since() == (None, 0.0)
