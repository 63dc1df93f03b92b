"""Decode steps through the buffers of captured graphs; here a replay runs the model on them, so no GPU is needed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from triton.runtime.errors import OutOfResources

from engine import load, prompt_graphs
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.cuda_graphs import DecodeGraphs, GraphSettings, capture_all, graph_sizes
from engine.errors import EngineConfigError, MachineError
from engine.model_settings import max_step_tokens
from engine.prompt_graphs import PromptSize, largest_prompt_step, prompt_sizes
from engine.runner import ModelRunner
from engine.step import StepBatch, StepRow
from tests.engine.fakes import FakeModel
from tests.engine.graph_tensors import bytes_kept
from tests.engine.requests import request, run_all, tokens_of
from tests.tables import rows


class CapturableModel(FakeModel):
    """Reads lengths from the device's tensor, as kernels do: the host's numbers are the longest there may be."""

    def __init__(self):
        super().__init__()
        self.num_prepared, self.num_calls_before = 0, []

    def why_not_capturable(self, max_num_tokens):
        return None if max_num_tokens <= 64 else f"{max_num_tokens} tokens"

    def prepare_replay(self):
        self.num_prepared += 1
        self.num_calls_before.append(self.num_calls)

    def __call__(self, batch, plan, kv, logits_RV=None):
        logits = super().__call__(replace(batch, seq_lens=tuple(batch.seq_lens_B.tolist())), plan, kv)
        return logits if logits_RV is None else logits_RV.copy_(logits)


class Replay:
    """Stands for a captured graph."""

    def __init__(self, settings, batch):
        self.settings, self.batch, self.num_replays = settings, batch, 0
        self.buffers = None
        self.idle_slots, self.idle_lens = set(), set()  # of tokens and rows without a request

    def replay(self, query_lens, seq_lens):
        self.num_replays += 1
        settings, batch = self.settings, self.batch
        assert query_lens == tuple(batch.query_start_B1.diff().tolist())
        assert seq_lens == tuple(batch.seq_lens_B.tolist())
        if self.buffers is not None:
            self.idle_slots.update(batch.slots_T[self.buffers.num_live_tokens :].tolist())
            self.idle_lens.update(batch.seq_lens_B[self.buffers.num_live_rows :].tolist())
        lens = tuple(batch.query_start_B1.diff().tolist())
        settings.model(replace(batch, query_lens=lens), "plan", settings.kv, settings.logits_MV[: len(lens)])


def core_with_graphs(monkeypatch, **settings):
    monkeypatch.setattr(GraphSettings, "capture", lambda settings, batch, pool, fill=None: Replay(settings, batch))
    monkeypatch.setattr(DecodeGraphs, "pool", None)
    monkeypatch.setattr(load, "_uses_graphs", lambda config, model: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    config = EngineConfig(model=Path("unused"), device="cpu", page_size=4, **settings)
    core = EngineCore(config, CapturableModel())
    for graphs in (core._runner.graphs, core._runner.prompt_graphs):
        for graph in graphs._graphs.values():
            graph.buffers = graphs.buffers
    return core


REQUESTS = [request(f"r{n}", range(1, 3 + 5 * n), 4 + 3 * n, ignore_eos=True) for n in range(7)]


def test_captured_steps_give_the_tokens_of_eager_ones(monkeypatch):
    eager = EngineCore(EngineConfig(model=Path("unused"), device="cpu", page_size=4), FakeModel())
    want = {name: tokens_of(outputs) for name, outputs in run_all(eager, REQUESTS).items()}
    core = core_with_graphs(monkeypatch, max_num_seqs=7)
    got = {name: tokens_of(outputs) for name, outputs in run_all(core, REQUESTS).items()}
    assert got == want
    graphs = core._runner.graphs
    assert graphs.sizes == [1, 2, 4, 7]
    assert all(graph.num_replays for graph in graphs._graphs.values()), "requests end at different steps"


def test_rows_without_a_request_write_to_the_spare_page_alone(monkeypatch):
    """Also rows that a request left: its pages may be another's by now."""
    core = core_with_graphs(monkeypatch, max_num_seqs=7, num_pages=40)
    run_all(core, REQUESTS[:3])  # the fourth row of their graph has never been used
    run_all(core, REQUESTS)
    graphs = core._runner.graphs
    assert core.info.num_pages == 40
    assert len(graphs._settings.kv[0].keys) == 41 * 4
    padded = [graph for graph in graphs._graphs.values() if graph.idle_slots]
    assert [graph.batch.num_tokens for graph in padded] == [7, 4]
    for graph in padded:
        assert graph.idle_slots == {160}
        assert graph.idle_lens == {1}


@rows("settings", {"max_num_seqs": 1}, {"max_num_seqs": 3, "num_pages": 13})
def test_captured_steps_when_requests_wait_give_way_and_leave(monkeypatch, settings):
    """One place; or too few pages, so that requests give way and come back in another row. One is aborted half-way."""
    kinds = [lambda **s: EngineCore(EngineConfig(model=Path("unused"), device="cpu", page_size=4, **s), FakeModel())]
    kinds.append(lambda **s: core_with_graphs(monkeypatch, **s))
    answers, num_preemptions = [], []
    for make in kinds:
        core = make(max_model_len=50, **settings)  # no multiple of the page size
        core.add(request("left", range(1, 9), 30, ignore_eos=True))
        for _ in range(5):
            core.step()
        core.abort("left")
        asked = [request(f"r{n}", range(1, 6 + n), 20, ignore_eos=True) for n in range(4)]
        longest = request("longest", range(1, 31), 20, ignore_eos=True)
        answers.append({name: tokens_of(outputs) for name, outputs in run_all(core, [*asked, longest]).items()})
        num_preemptions.append(core.stats().num_preemptions)
    assert answers[0] == answers[1]
    assert len(answers[1]["longest"]) == 20
    assert all(num_preemptions) == (settings["max_num_seqs"] > 1)


def test_a_step_with_a_prompt_or_without_a_token_to_sample_is_no_decode_step(monkeypatch):
    core = core_with_graphs(monkeypatch, max_num_seqs=4)
    graphs = core._runner.graphs
    row = StepRow(0, 3, 1, True, 1)
    none = np.zeros(0, np.int64)
    step = StepBatch([row] * 2, *np.ones((3, 2), np.int64), none, True, none, none)
    assert graphs.serves(step)
    assert not graphs.serves(replace(step, rows=[row, StepRow(1, 3, 1, False, 0)]))
    assert not graphs.serves(replace(step, is_decode=False))
    assert graphs.serves(replace(step, rows=[row] * 4))
    assert not graphs.serves(replace(step, rows=[row] * 5))


@rows(
    "max_num_seqs, sizes",
    (1, [1]),
    (3, [1, 2, 3]),
    (20, [1, 2, 4, 8, 16, 20]),
    (100, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 100]),
)
def test_sizes_end_with_the_number_of_places(max_num_seqs, sizes):
    assert graph_sizes(max_num_seqs) == sizes


def test_every_number_of_requests_has_a_graph_that_wastes_little():
    sizes = graph_sizes(512)
    assert sizes == sorted(set(sizes))
    for count in range(1, 513):
        size = next(size for size in sizes if size >= count)
        assert size - count <= max(31 if count > 64 else 7, 0)


@rows(
    "error",
    torch.OutOfMemoryError("CUDA: out of memory"),
    RuntimeError("CUDA: out of streams"),
    OutOfResources(300, 200, "shared memory"),
    OSError(28, "No space left: out of disk"),
)
def test_a_size_that_cannot_be_captured_is_named_with_the_ways_out(monkeypatch, error):
    """Triton's errors are no RuntimeErrors. The next start may find memory, disk or a sound GPU."""

    def fail(size):
        raise error

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    with pytest.raises(MachineError, match=r"step of 4 cannot.*out of .*enforce_eager.*max_num_seqs"):
        capture_all("decode steps", [1, 2, 4], fail)
    with pytest.raises(MachineError, match=r"step of 64 tokens of 8 requests cannot"):
        capture_all("steps with prompts", [PromptSize(64, 9)], fail)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_captured_steps_with_prompts_give_the_tokens_of_eager_ones(monkeypatch, overlap):
    """Prompts alone, several at once, in chunks, beside decodes; with log-probabilities of a prompt, which need eager
    steps; requests give way and come back.
    """
    monkeypatch.setattr(prompt_graphs, "_TOKENS", (8, 16, 24))
    monkeypatch.setattr(prompt_graphs, "_ROWS", (2, 4))
    requests = [*REQUESTS, request("scored", range(1, 20), 3, prompt_logprobs=1)]
    settings = {"max_num_seqs": 6, "num_pages": 24, "max_num_batched_tokens": 30, "overlap": overlap}
    eager = EngineCore(EngineConfig(model=Path("unused"), device="cpu", page_size=4, **settings), FakeModel())
    want = {name: tokens_of(outputs) for name, outputs in run_all(eager, requests).items()}
    core = core_with_graphs(monkeypatch, **settings)
    for first in range(len(requests)):
        got = {name: tokens_of(outputs) for name, outputs in run_all(core, requests[first:]).items()}
        assert got == {each.request_id: want[each.request_id] for each in requests[first:]}
    assert core.stats().num_preemptions
    graphs = core._runner.prompt_graphs._graphs
    assert list(graphs) == list(reversed(core._runner.prompt_graphs.sizes))
    assert sum(graph.num_replays > 0 for graph in graphs.values()) >= 3
    spare_slots = {slot for graph in graphs.values() for slot in graph.idle_slots}
    assert spare_slots == {24 * 4}, "tokens without a request write to the spare page alone"


def test_sizes_of_steps_with_prompts(monkeypatch):
    sizes = prompt_sizes(256, 1024)
    assert sizes == sorted(set(sizes))
    assert max(sizes) == (1024, 257)
    one, two = (EngineConfig(model=Path("unused"), tensor_parallel_size=count) for count in (1, 2))
    more = prompt_sizes(256, largest_prompt_step(two))
    assert more[: len(sizes)] == sizes
    assert max(more) == (4096, 257)
    assert {size.num_rows for size in more[len(sizes) :]} == {64, 257}, "padded rows cost little there"
    assert prompt_sizes(4, 4096)[-1] == (4096, 5)
    assert largest_prompt_step(one) == 1024
    assert prompt_sizes(256, 63) == [], "a context too short for the smallest"
    assert all(size.num_rows < size.num_tokens for size in sizes), "the first row is a prompt"
    graphs = core_with_graphs(monkeypatch, max_num_seqs=100)._runner.prompt_graphs
    batch = graphs.batch(PromptSize(64, 9))
    row = torch.zeros(1, dtype=torch.int64)
    for num_tokens, num_rows, want in ((2, 1, (64, 8)), (64, 7, (64, 8)), (65, 8, (128, 64)), (128, 100, (128, 101))):
        ids = row.expand(num_tokens)
        step = replace(batch, input_ids_T=ids, query_lens=(0,) * num_rows, logit_rows_R=row.expand(num_rows))
        assert graphs.size_for(step) == want
    assert graphs.size_for(replace(step, input_ids_T=row.expand(1025))) is None
    assert graphs.size_for(replace(step, logit_rows_R=row.expand(102))) is None, "log-probabilities of a prompt"


def test_a_rank_without_tokens_replays_padding_that_touches_no_request(monkeypatch):
    core = core_with_graphs(monkeypatch, max_num_seqs=4)
    runner, graphs = core._runner, core._runner.prompt_graphs
    run_all(core, [request("a", list(range(20)), 3, ignore_eos=True), request("b", [1, 2], 3, ignore_eos=True)])
    before = {size: graph.num_replays for size, graph in graphs._graphs.items()}
    runner.run_idle(64, False)
    [size] = [size for size, graph in graphs._graphs.items() if graph.num_replays > before[size]]
    batch = graphs._graphs[size].batch
    assert batch.num_tokens == 64
    assert set(batch.slots_T.tolist()) == {graphs._settings.spare_page * 4}
    assert batch.query_start_B1.tolist() == [0, *(64,) * size.num_rows], "the first row has all tokens"
    assert batch.seq_lens_B.tolist() == [64, *(1,) * (size.num_rows - 1)]
    runner.run_idle(3, True)
    assert set(runner.graphs.buffers.pages[0].slots_M.tolist()) == {graphs._settings.spare_page * 4}
    assert set(runner.graphs.buffers.lens_M.tolist()) == {1}


class Replays:
    """Stands for the captured graphs; notes which is replayed."""

    def __init__(self, size, log):
        self._size, self._log = size, log

    def replay(self, query_lens, seq_lens):
        self._log.append(self._size)


def test_ranks_replay_the_graph_of_the_largest_step_together_or_none():
    model = FakeModel()
    settings = GraphSettings(
        model=model, kv=[], logits_MV=torch.zeros(9, model.vocab_size), page_size=4, max_num_seqs=8, max_model_len=64,
        spare_page=3, is_sliding=False,
    )  # fmt: skip
    runner = ModelRunner(FakeModel(), [], page_size=4, max_num_seqs=8, max_model_len=64)
    graphs = DecodeGraphs(settings, runner.tokens_M)
    log = []
    graphs._graphs = {size: Replays(size, log) for size in graphs.sizes}
    for agreed, served in (((None, False), True), ((5, True), True), ((5, False), False)):
        updates, no_slots = np.zeros((0, 3), np.int32), np.zeros(0, np.int64)
        numbers = np.array([[7], [3], [3]])
        step = StepBatch([StepRow(0, 3, 1, True, 1)], *numbers, updates, True, no_slots, updates, *agreed[::-1])
        assert graphs.serves(step) == served
        if served:
            assert len(graphs.run(step, [np.zeros((8, 16), np.int32)])) == 1
    assert log == [1, 8]

    idle = []
    runner.model.run_idle = lambda max_rank_tokens, all_ranks_decode: idle.append((max_rank_tokens, all_ranks_decode))
    runner.graphs = graphs
    runner.run_idle(5, True)
    runner.run_idle(300, False)
    assert (log, idle) == ([1, 8, 8], [(300, False)]), "an idle rank replays the graph of the others, if there is one"


def test_graphs_are_for_gpus_and_paths_that_can_be_captured(monkeypatch, caplog):
    config = EngineConfig(model=Path("unused"))
    model = CapturableModel()
    assert not load._uses_graphs(config, model)
    model.device = torch.device("cuda")
    assert load._uses_graphs(config, model)
    assert not load._uses_graphs(replace(config, enforce_eager=True), model)
    with caplog.at_level("INFO"):
        assert not load._uses_graphs(replace(config, max_num_seqs=65), model)
    assert "65 tokens cannot be captured" in caplog.text


def test_the_transport_is_prepared_before_every_replay(monkeypatch):
    """What a replay needs of the transport cannot be part of it: DeepEP's cleaning would run always or never."""
    core = core_with_graphs(monkeypatch, max_num_seqs=4)
    run_all(core, REQUESTS[:2])
    graphs = core._runner.graphs
    model = graphs._settings.model
    captured = [*graphs._graphs.values(), *core._runner.prompt_graphs._graphs.values()]
    num_replays = sum(graph.num_replays for graph in captured)
    assert 0 < num_replays == model.num_prepared
    assert len(set(model.num_calls_before)) == num_replays, "before each replay, not in it"
    assert graphs.batch(1).all_ranks_decode, "a captured step is a decode step on all ranks"


RANKS = {"tensor_parallel_size": 2, "expert_parallel_size": 2}


@rows(
    "settings, num_prompts",
    ({}, 8),
    ({"max_model_len": 100}, 2),
    ({"max_num_batched_tokens": 64}, 2),
    (RANKS, 8),
    (RANKS | {"moe_a2a_backend": "deepep"}, 0),
)
def test_memory_for_graphs_is_set_aside_before_pages_are_counted(monkeypatch, settings, num_prompts):
    """Logits that all graphs share, 32 MiB for each graph that is captured, five of decodes and others of prompts, and
    the tensors that the graphs read. The context is of 256 tokens or less.
    """
    asked = []

    def choose(layout, *, sampling_bytes, **others):
        asked.append(sampling_bytes)
        raise EngineConfigError("enough")

    monkeypatch.setattr(load, "choose_cuda_pages", choose)
    model = CapturableModel()
    model.device = torch.device("cuda")
    for enforce_eager in (True, False):
        config = EngineConfig(model=Path("unused"), max_num_seqs=9, enforce_eager=enforce_eager, **settings)
        with pytest.raises(EngineConfigError, match="enough"):
            load.load_engine(config, model)
    runner = core_with_graphs(monkeypatch, max_num_seqs=9)._runner
    step_tokens = max_step_tokens(config, model.device)
    decodes, prompts = load._make_graphs(config, runner, config.max_model_len or 256, step_tokens, spare_page=0)
    assert (len(decodes.sizes), len(prompts.sizes if prompts else ())) == (5, num_prompts)
    logits_bytes = (3 if settings.items() >= RANKS.items() else 1) * 10 * model.vocab_size * 4
    kept_bytes = bytes_kept(decodes, prompts, runner.tokens_M)
    assert asked[1] - asked[0] == logits_bytes + (5 + num_prompts) * (32 << 20) + kept_bytes
