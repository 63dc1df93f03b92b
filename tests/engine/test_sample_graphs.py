"""`SampleGraphs` on a device whose streams run in any order: the words that reach its graphs, the tokens that come."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine import gpu_sample_graphs
from engine.gpu_params import NUM_FLOATS, NUM_INTS, RequestRules, row_numbers
from engine.gpu_sample_graphs import SampleGraphs
from engine.runner import Pending
from engine.sequence import Sequence
from engine.transfer import HostBuffers, HostResults
from tests.engine.fake_streams import FakeStreams, FakeTensor
from tests.engine.requests import request
from tests.tables import rows

SIZES = [1, 2, 4, 8]
VOCAB_SIZE = 97


def token_of(ints, draw):
    """What the fake graphs choose: it depends on all that is said of a row."""
    return int(ints @ np.arange(1, NUM_INTS + 1)) + int(draw * 1000)


class FakeGraph:
    """Reads the words and writes the tokens when the device comes to it."""

    def __init__(self, streams, rows, log):
        self._streams, self._rows, self._log = streams, rows, log

    def replay(self):
        self._streams.compute.launch(self._run)

    def _run(self):
        ints_NI = self._rows.ints.view(-1, NUM_INTS).numpy()
        draws_N = self._rows.floats.view(torch.float64).view(-1, NUM_FLOATS)[:, 2].tolist()
        tokens = [token_of(ints, draw) for ints, draw in zip(ints_NI, draws_N, strict=True)]
        self._rows.tokens_R.copy_(torch.tensor(tokens))
        self._log.append([row for row in self._rows.listed_D.tolist() if row >= 0])


@pytest.fixture
def on_device(monkeypatch):
    """Makes graphs for a device whose streams `pick` runs; `drawn` lists the drawn rows of each replay."""

    def make(pick):
        streams = FakeStreams(monkeypatch, pick)
        for name, of_gpu in (("HostBuffers", HostBuffers), ("HostResults", HostResults)):
            wrapped = lambda tensor, of_gpu=of_gpu: of_gpu(FakeTensor(streams, tensor))  # noqa: E731
            monkeypatch.setattr(gpu_sample_graphs, name, wrapped)
        graphs, drawn = SampleGraphs(torch.zeros(8, VOCAB_SIZE), SIZES, lambda rows: None), []
        for size in SIZES:
            for has_draws in (False, True):
                graphs._graphs[size, has_draws] = FakeGraph(streams, graphs._rows(size, has_draws), drawn)
        return SimpleNamespace(graphs=graphs, streams=streams, drawn=drawn, copies=graphs._host._target_N.copies)

    return make


def make_seq(index, **sampling):
    return Sequence(request(f"r{index}", [1, 2], 99, **sampling), stop_ids=frozenset(), seed=index)


def numbers_of(seqs, first_place=0):
    """Integers, floats and drawn rows of a step."""
    rules = [RequestRules.of(seq, num_groups=4, list_size=8, vocab_size=VOCAB_SIZE) for seq in seqs]
    order = list(range(len(seqs)))
    places = [place + first_place for place in order]
    ints, floats, _ = row_numbers(seqs, rules, order, places, VOCAB_SIZE)
    return ints, floats, [row for row, rule in enumerate(rules) if rule.kind]


@rows("seed", *range(20))
def test_every_step_gets_the_tokens_of_its_own_rows(on_device, seed):
    """Batches of all sizes, greedy and drawn, some as the one before; up to three steps are not collected."""
    rng = random.Random(seed)
    device = on_device(rng.choice)
    unread, want_drawn, repeated = [], [], 0
    seqs = [make_seq(0)]
    for _ in range(60):
        if rng.random() < 0.5:
            kinds = [rng.choice(({}, {"temperature": 0.7}, {"top_k": 3})) for _ in range(rng.randrange(1, 9))]
            seqs = [make_seq(rng.randrange(3), **kind) for kind in kinds]
        else:
            repeated += 1
        ints, floats, drawn = numbers_of(seqs, rng.randrange(2))
        pending = device.graphs.launch(ints, floats, drawn)
        want_drawn.append(drawn)
        unread.append((pending, [token_of(*row) for row in zip(ints, floats[:, 2], strict=True)]))
        for seq in seqs:
            seq.token_ids.append(5)
        while len(unread) > rng.randrange(4):
            pending, want = unread.pop(0)
            pending.copy_mark.wait()
            assert pending.read().tokens == want
    assert repeated > 10
    device.streams.run_until(lambda: not device.streams.compute.work)
    assert device.drawn == want_drawn


def test_greedy_rows_are_sent_once_and_drawn_ones_in_every_step(on_device):
    device = on_device(random.Random(3).choice)
    for seqs, want in (
        ([make_seq(0), make_seq(1)], 1),
        ([make_seq(0), make_seq(1), make_seq(2)], 1),
        ([make_seq(0), make_seq(1, temperature=1.0)], 5),
    ):
        device.copies.clear()
        for _ in range(5):
            device.graphs.launch(*numbers_of(seqs)).copy_mark.wait()
            for seq in seqs:
                seq.token_ids.append(7)
        assert len(device.copies) == want


def test_a_place_that_changes_is_sent(on_device):
    device = on_device(random.Random(3).choice)
    for first_place in (0, 0, 1, 0):
        device.graphs.launch(*numbers_of([make_seq(0)], first_place)).copy_mark.wait()
    assert len(device.copies) == 3


def test_a_step_is_collected_when_its_tokens_are_on_the_host(on_device):
    """Also while the stream of the copies comes last of all."""
    device = on_device(lambda ready: ready[0])  # the compute stream if it can go on
    seqs = [make_seq(0), make_seq(1, temperature=1.0)]

    class OnDevice:
        def launch(self, logits_LV, seqs, logit_rows, places):
            return device.graphs.launch(*numbers_of(seqs))

    step = SimpleNamespace(rows=[SimpleNamespace(num_logit_rows=1, samples=True, row=row) for row in range(2)])
    for _ in range(3):
        pending = Pending(step, torch.zeros(2, VOCAB_SIZE), OnDevice())
        pending.sample(seqs)
        ints, floats, _ = numbers_of(seqs)
        want = [token_of(*row) for row in zip(ints, floats[:, 2], strict=True)]
        assert [result.token for result in pending.collect()] == want
        for seq in seqs:
            seq.token_ids.append(7)
