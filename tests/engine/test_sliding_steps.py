"""Steps with two page tables: as records for other ranks, in captured graphs, and with the bundled model."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine import load, prompt_graphs
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.cuda_graphs import DecodeGraphs, GraphSettings
from engine.kv_cache import KvLayout
from engine.runner import ModelRunner
from engine.step import StepBatch
from model.config import ModelSettings
from model.registry import build_model
from tests.engine.fakes import fake_core
from tests.engine.requests import request, run_all, tokens_of
from tests.engine.windowed import PoisonedPages, WindowedModel, windowed_core

BUNDLED = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"
REQUESTS = [request(f"r{n}", range(n, 4 + 2 * n), 42, ignore_eos=True) for n in range(6)]


def test_recorded_steps_give_the_same_logits_on_another_runner():
    core, _ = windowed_core(num_pages=14, max_num_seqs=4, overlap=True)
    runner, records = core._runner, []
    launch = runner.launch

    def record(step):
        tokens = runner.tokens_M.clone()
        pending = launch(step)
        records.append((step.pack(), tokens, pending.logits_RV.clone()))
        return pending

    runner.launch = record
    run_all(core, REQUESTS)
    assert core.stats().num_preemptions
    model = WindowedModel()
    kv = KvLayout(specs=tuple(model.kv_specs), page_size=4, dtype=torch.float32).allocate(28, model.device)
    other = ModelRunner(model, kv, page_size=4, max_num_seqs=4, max_model_len=68, is_sliding=True)
    for packed, tokens, logits in records:
        other.tokens_M.copy_(tokens)
        again = StepBatch.unpack(packed)
        assert len(again.sliding_slots) == len(again.slots)
        np.testing.assert_array_equal(other.launch(again).logits_RV, logits)


def test_a_model_without_sliding_layers_sends_nothing_for_them():
    core = fake_core()
    steps, launch = [], core._runner.launch
    core._runner.launch = lambda step: (steps.append(step), launch(step))[1]
    run_all(core, REQUESTS[:1])
    assert {(len(step.sliding_slots), len(step.sliding_page_updates)) for step in steps} == {(0, 0)}
    assert core._runner.make_batch(steps[0]).sliding is None


class CapturableModel(WindowedModel):
    """Reads lengths from the device's tensor, as kernels do."""

    def __call__(self, batch, plan, kv, logits_RV=None):
        query_lens, seq_lens = batch.query_start_B1.diff().tolist(), batch.seq_lens_B.tolist()
        logits = super().__call__(replace(batch, query_lens=tuple(query_lens), seq_lens=tuple(seq_lens)), plan, kv)
        return logits if logits_RV is None else logits_RV.copy_(logits)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_captured_steps_give_the_tokens_of_eager_ones(monkeypatch, overlap):
    """Requests end, give way and come back in other rows; rows without a request write to the spare page of both."""
    idle_slots, core = [], None

    def capture(settings, batch, pool, fill=None):
        def replay(query_lens, seq_lens):
            if core is None or core._runner.prompt_graphs is None:  # still loading
                return
            buffers = core._runner.graphs.buffers if batch.all_ranks_decode else core._runner.prompt_graphs.buffers
            for its_batch in (batch, batch.sliding):
                idle_slots.extend(its_batch.slots_T[buffers.num_live_tokens :].tolist())
            settings.model(batch, "plan", settings.kv, settings.logits_MV[: len(batch.query_lens)])

        return SimpleNamespace(replay=replay)

    monkeypatch.setattr(GraphSettings, "capture", capture)
    monkeypatch.setattr(DecodeGraphs, "pool", None)
    monkeypatch.setattr(prompt_graphs, "_TOKENS", (8, 16))
    monkeypatch.setattr(prompt_graphs, "_ROWS", (2, 4))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    answers = []
    for uses_graphs in (False, True):
        monkeypatch.setattr(load, "_uses_graphs", lambda config, model, uses=uses_graphs: uses)
        core = fake_core(CapturableModel(max_model_len=68), num_pages=14, max_num_seqs=5, overlap=overlap)
        answers.append({name: tokens_of(outputs) for name, outputs in run_all(core, REQUESTS).items()})
        assert core.stats().num_preemptions
        assert core.info.num_pages == 28
    assert answers[0] == answers[1]
    assert set(idle_slots) == {28 * 4}


@pytest.fixture(scope="module")
def bundled():
    return build_model(BUNDLED, ModelSettings(device=torch.device("cpu"), selfcheck="off"))


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_the_bundled_model_answers_the_same_with_uniform_pages(monkeypatch, bundled, overlap):
    """Its window is 128. Pages that went hold NaN, so reading one would make an answer an error."""
    prompts = [[100 + (7 * n * i) % 400 for i in range(size)] for n, size in enumerate((300, 150, 129, 20), 1)]
    requests = [request(f"r{n}", ids, 20, ignore_eos=True) for n, ids in enumerate(prompts)]
    settings = {"max_num_batched_tokens": 100, "max_model_len": 400, "max_num_seqs": 4}
    answers, counts = [], []
    for is_uniform in (False, True):
        if is_uniform:
            monkeypatch.setattr(KvLayout, "window", None)
        core = EngineCore(EngineConfig(model=BUNDLED, device="cpu", overlap=overlap, **settings), bundled)
        bundled.window = core._scheduler._paging._needs.window
        guard = PoisonedPages(core)
        outputs = run_all(core, requests) | run_all(core, [request("again", prompts[0], 20, ignore_eos=True)])
        answers.append({name: (tokens_of(outs), outs[-1].finish_reason) for name, outs in outputs.items()})
        assert core.stats().num_pages_used == 0
        counts.append((guard.num_slid, core.stats().num_cached_tokens))
    assert answers[0] == answers[1]
    assert {reason for _, reason in answers[0].values()} == {"length"}
    assert counts == [(counts[0][0], 288), (0, 288)]
    assert counts[0][0] > 10
