"""`StepBatch` as a record: to bytes and back, and run again on another runner."""

import random

import msgspec
import numpy as np
import pytest
import torch

from engine.batching import make_step
from engine.kv_cache import KvLayout
from engine.runner import ModelRunner
from engine.sequence import Chunk, Sequence
from engine.step import LATE_ID, StepBatch
from tests.engine.fakes import FakeModel, fake_core
from tests.engine.requests import request, run_all
from tests.tables import rows


def make_chunk(row, num_known, start, num_tokens, num_promised=0):
    seq = Sequence(request("a", range(num_known)), stop_ids=frozenset(), seed=0)
    seq.row, seq.num_computed, seq.num_promised = row, start, num_promised
    seq.pages = list(range(100 * row, 100 * row + 1 + (num_known + num_promised - 1) // 4))
    return Chunk.next_of(seq, num_tokens)


STEPS = {
    "mixed": lambda: [make_chunk(3, 9, 2, 6), make_chunk(1, 5, 5, 1, num_promised=1), make_chunk(2, 7, 0, 7)],
    "decode": lambda: [make_chunk(row, 9, 8, 1) for row in range(5)],
    "late": lambda: [make_chunk(row, 8, 8, 1, num_promised=1) for row in range(5)],
}


@rows("kind", *STEPS)
def test_a_record_survives_the_way_to_another_rank(kind):
    step = make_step(STEPS[kind](), 4)
    again = StepBatch.unpack(step.pack())
    assert (again.rows, again.is_decode) == (step.rows, step.is_decode)
    for name in ("input_ids", "positions", "slots", "page_updates"):
        mine, other = getattr(again, name), getattr(step, name)
        assert mine.dtype == other.dtype
        assert mine.tolist() == other.tolist()


def test_bytes_that_are_no_record_are_refused():
    with pytest.raises(msgspec.DecodeError):
        StepBatch.unpack(b"\x93\x01\x02\x03")


def test_the_token_on_its_way_is_marked_as_late():
    step = make_step(STEPS["mixed"](), 4)
    assert step.input_ids.tolist() == [2, 3, 4, 5, 6, 7, LATE_ID, *range(7)]
    assert step.positions.tolist() == [2, 3, 4, 5, 6, 7, 5, *range(7)]
    assert step.slots.tolist() == [1202, 1203, 1204, 1205, 1206, 1207, 405, *range(800, 807)]
    assert [(row.samples, row.num_logit_rows) for row in step.rows] == [(False, 0), (True, 1), (True, 1)]
    assert not step.is_decode


def test_pages_are_told_of_once():
    chunks = [make_chunk(3, 9, 2, 6), make_chunk(1, 5, 4, 1)]
    updates = [[3, 0, 300], [3, 1, 301], [3, 2, 302], [1, 0, 100], [1, 1, 101]]
    assert make_step(chunks, 4).page_updates.tolist() == updates
    assert make_step(chunks, 4).page_updates.tolist() == []
    chunks[0].seq.pages.append(77)
    assert make_step(chunks, 4).page_updates.tolist() == [[3, 3, 77]]


@rows("overlap", False, True)
def test_recorded_steps_give_the_same_logits_on_another_runner(overlap):
    """As on another rank: it sees the records, and the tokens that were chosen, alone."""
    core = fake_core(num_pages=17, max_num_seqs=4, overlap=overlap)
    runner, records = core._runner, []
    launch = runner.launch

    def record(step):
        tokens = runner.tokens_M.clone()
        pending = launch(step)
        records.append((step.pack(), tokens, pending.logits_RV.clone()))
        return pending

    runner.launch = record
    rng = random.Random(1)
    sampling = {"temperature": 0.9, "ignore_eos": True, "presence_penalty": 0.5}
    prompts = [[rng.randrange(97) for _ in range(rng.randrange(1, 30))] for _ in range(9)]
    run_all(core, [request(f"r{n}", ids, 30, seed=n, **sampling) for n, ids in enumerate(prompts)])
    assert core.stats().num_preemptions
    assert any((StepBatch.unpack(packed).input_ids == LATE_ID).any() for packed, _, _ in records) == overlap

    model = FakeModel()
    kv = KvLayout(specs=tuple(model.kv_specs), page_size=4, dtype=torch.float32).allocate(17, model.device)
    other = ModelRunner(model, kv, page_size=4, max_num_seqs=4, max_model_len=68)
    for packed, tokens, logits in records:
        other.tokens_M.copy_(tokens)
        again = other.launch(StepBatch.unpack(packed)).logits_RV
        np.testing.assert_array_equal(again, logits)
