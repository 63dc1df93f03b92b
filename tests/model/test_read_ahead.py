"""Experts are read one layer ahead in a thread, never two layers at a time, and errors surface where they belong."""

import threading

import pytest
import torch

from loaders.phases import Phase, StartPhases
from model.read_ahead import ExpertReader
from moe.formats import Bf16Weight, ExpertWeights

CPU = torch.device("cpu")


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
