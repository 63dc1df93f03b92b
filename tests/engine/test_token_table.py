"""The table of token counts: each request finds exactly its own tokens in its place, whoever had the place before."""

import random
from collections import Counter

import numpy as np
import torch

from engine.gpu_counts import TokenTable
from engine.sequence import Sequence
from tests.engine.requests import request

VOCAB_SIZE, NUM_PLACES = 11, 3


class Device:
    """Does to the table what `clear_counts` and `add_counts` do."""

    def __init__(self):
        self.table = TokenTable(NUM_PLACES, VOCAB_SIZE, torch.device("cpu"))
        self.num_told = 0

    def update(self, seqs, places, fails=False):
        cleared, entries = self.table.changes(seqs, places)
        counts = self.table.counts_MV
        counts[cleared] = 0
        for entry in entries.tolist()[: len(entries) // 2 if fails else None]:
            place, token, is_prompt = entry >> 32, (entry & 0xFFFFFFFF) >> 1, entry & 1
            if is_prompt:
                counts[place, token] |= -(2**31)
            else:
                counts[place, token] += 1
        self.num_told += len(entries)
        if not fails:
            self.table.commit()


def make(name, prompt):
    seq = Sequence(request(name, prompt, 100, frequency_penalty=1.0), stop_ids=frozenset(), seed=0)
    seq.sampler_state = object()
    return seq


def expected(seq):
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.int32)
    for token, count in Counter(seq.token_ids[seq.num_prompt :]).items():
        counts[token] = count
    counts[sorted(set(seq.token_ids[: seq.num_prompt]))] |= -(2**31)
    return counts


def test_each_request_finds_its_own_tokens_whoever_had_its_place_before():
    rng = random.Random(0)
    device = Device()
    seqs = []
    for step in range(400):
        while len(seqs) < 5:
            seqs.append(make(f"r{step}", [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 4]))]))
        running = rng.sample(seqs, rng.choice([1, 2, 3]))
        places = rng.sample(range(NUM_PLACES), len(running))
        if rng.random() < 0.2:
            device.update(running, places, fails=True)  # and the step is sampled again, in the same places or in others
            continue
        device.update(running, places)
        for seq, place in zip(running, places, strict=True):
            want = expected(seq)
            assert torch.equal(device.table.counts_MV[place], want), step
            seq.token_ids.append(rng.randrange(VOCAB_SIZE))
        if rng.random() < 0.1:
            seqs.remove(rng.choice(seqs))


def test_a_request_that_keeps_its_place_sends_one_token_a_step():
    device, seq = Device(), make("a", [1, 2, 2])
    device.update([seq], [1])
    assert device.num_told == 3
    for token in (4, 4, 1):
        seq.token_ids.append(token)
        device.update([seq], [1])
    device.update([seq], [1])  # a step that is sampled again
    assert device.num_told == 6
    assert torch.equal(device.table.counts_MV[1], expected(seq))


def test_no_request_with_penalties_changes_nothing():
    cleared, entries = Device().table.changes([], [])
    assert len(cleared) == len(entries) == 0
    assert cleared.dtype == entries.dtype == np.int64
