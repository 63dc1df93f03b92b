"""Experts are read one layer ahead in a thread, never two layers at a time, and errors surface where they belong."""

import threading
from pathlib import Path

import pytest
import torch

from loaders.checkpoint import Checkpoint
from loaders.phases import Phase, StartPhases
from model.config import ModelSettings
from model.read_ahead import ExpertReader
from model.registry import build_model
from moe.formats import Bf16Weight, ExpertWeights
from tests.model.paged import PagedCache, run

CPU = torch.device("cpu")
ASSETS = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"
NAMES = Checkpoint.open(ASSETS).names()
STEPPED = ("loading weights", "processing weights", "self-check")


def logits_of(model):
    cache = PagedCache(model.kv_specs)
    with torch.inference_mode():
        return run(model, cache.batch({"a": [3, 1, 4, 1, 5, 9, 2, 6], "b": [7, 8]}, all_logits=True), cache.layers)


def experts(layer):
    weight = torch.full((1, 2, 2), float(layer))
    return ExpertWeights(w13=Bf16Weight(weight), w2=Bf16Weight(weight[:, :, :1]))


class Reads:
    """What was read, in which thread; blocks while `gate` is closed."""

    def __init__(self):
        self.begun, self.threads, self.gate = [], [], threading.Event()
        self.gate.set()
        self.has_begun = threading.Condition()

    def __call__(self, layer):
        with self.has_begun:
            self.begun.append(layer)
            self.threads.append(threading.current_thread())
            self.has_begun.notify_all()
        self.gate.wait(10)
        if layer == 13:
            raise OSError("layer 13 is damaged")
        return experts(layer)

    def wait_for(self, layer):
        with self.has_begun:
            return self.has_begun.wait_for(lambda: layer in self.begun, 10)


def reader(reads, layers, *, is_ahead, phases=None):
    phases = phases or StartPhases()
    with phases.phase(Phase.WEIGHTS):
        pass
    return ExpertReader(reads, layers, CPU, phases, is_ahead=is_ahead)


def value(weights):
    return float(weights.w13.data[0, 0, 0])


@pytest.mark.parametrize("is_ahead", [False, True])
def test_each_layer_is_read_once_in_order(is_ahead):
    reads = Reads()
    with reader(reads, [1, 2, 5], is_ahead=is_ahead) as source:
        assert [value(source.take(layer)) for layer in (1, 2, 5)] == [1, 2, 5]
    assert reads.begun == [1, 2, 5]


def test_the_next_layer_is_read_while_this_one_is_processed_and_no_further():
    reads = Reads()
    with reader(reads, [1, 2, 5], is_ahead=True) as source:
        source.take(1)
        assert reads.wait_for(2)
        assert reads.threads[1] is not threading.current_thread()
        threading.Event().wait(0.05)
        assert 5 not in reads.begun  # it follows when 2 has left host memory
        source.take(2)
        assert reads.wait_for(5)


def test_without_reading_ahead_nothing_is_read_before_it_is_asked_for():
    reads = Reads()
    with reader(reads, [1, 2], is_ahead=False) as source:
        source.take(1)
        assert reads.begun == [1]
        assert reads.threads == [threading.current_thread()]


def test_an_error_of_the_thread_is_raised_with_its_own_layer():
    reads = Reads()
    with reader(reads, [1, 13], is_ahead=True) as source:
        assert value(source.take(1)) == 1
        with pytest.raises(OSError, match="layer 13"):
            source.take(13)


def test_leaving_early_ends_the_thread():
    reads = Reads()
    with reader(reads, [1, 13], is_ahead=True) as source:
        source.take(1)
        assert reads.wait_for(13)
    assert not any(thread.name.startswith("read-ahead") for thread in threading.enumerate())


def test_reading_beside_other_work_is_counted_as_hidden():
    phases = StartPhases()

    def slow(layer):
        threading.Event().wait(0.2)
        return experts(layer)

    with reader(slow, [1, 2], is_ahead=True, phases=phases) as source:
        source.take(1)  # read while the start waits for it
        assert phases.progress().phases[-1].hidden_s == 0
        threading.Event().wait(0.4)
        source.take(2)
    assert 0.15 < phases.progress().phases[-1].hidden_s < 0.4


def test_a_model_read_ahead_is_the_same_model(monkeypatch):
    settings = ModelSettings(dtype=torch.float32, selfcheck="all")
    want = logits_of(build_model(ASSETS, settings))
    threads = []

    def spied(read, layers, device, phases, *, is_ahead):
        assert not is_ahead, "on a CPU both layers would be in host memory"

        def read_noting(layer):
            threads.append(threading.current_thread().name)
            return read(layer)

        return ExpertReader(read_noting, layers, device, phases, is_ahead=True)

    monkeypatch.setattr("model.load.ExpertReader", spied)
    phases = StartPhases()
    assert torch.equal(logits_of(build_model(ASSETS, settings, phases=phases)), want)
    assert [name.startswith("read-ahead") for name in threads] == [False] + [True] * 5
    times = {each.phase: each for each in phases.progress().phases}
    assert times["loading weights"].num_bytes == sum(Checkpoint.open(ASSETS).meta(n).nbytes for n in NAMES)
    assert [(times[name].done, times[name].total) for name in STEPPED] == [(6, 6)] * 3
