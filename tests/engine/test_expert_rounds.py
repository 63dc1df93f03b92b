"""What ranks do for their experts between steps: counted, reported, moved one layer a step; and padded alike."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from engine import expert_rounds
from engine.config import EngineConfig
from engine.errors import EngineConfigError
from engine.expert_file import FORMAT, RecordedLayer, RecordedLoad, read_load, record_of
from engine.expert_rounds import ExpertRounds
from engine.step import StepBatch, StepRow
from engine.types import ExpertLoad
from tests.engine.fakes import FakeModel
from tests.engine.requests import request, run_all
from tests.engine.test_cuda_graphs import core_with_graphs
from tests.engine.test_ranks_policy import ranked_core
from tests.tables import rows


class FakeBalance:
    """Counters of two layers with three experts; notes what moves with which load."""

    def __init__(self):
        self.counts_LE = torch.ones(2, 3, dtype=torch.int64)
        self.layers = [type("Layer", (), {"layer": number}) for number in (1, 4)]
        self.num_experts = 3
        self.moved = []

    def total(self, world):
        return self.counts_LE * 2  # of two ranks

    def rank_loads(self, index, load_E):
        return [sum(load_E[:1]), sum(load_E[1:])]

    def rebalance(self, index, load_E, world):
        self.moved.append((index, load_E))
        return 3


def count(balance, *tokens):
    balance.counts_LE += torch.tensor(tokens)


def test_what_warmed_up_is_forgotten_and_the_rest_is_reported(monkeypatch):
    monkeypatch.setattr(expert_rounds, "REPORT_STEPS", 3)
    balance = FakeBalance()
    rounds = ExpertRounds(balance)
    assert not rounds.has_news
    for _ in range(3):
        rounds.before_step()
        count(balance, 4, 1, 1)
    assert rounds.report().rows() == [[0, 0, 0]] * 2, "else a service that counts seems not to, until it first reports"
    rounds.before_step()
    first = rounds.report()
    assert first.rows() == [[24, 6, 6]] * 2
    assert (first.layers, first.num_experts, first.rank_ratios) == ([1, 4], 3, [24 * 2 / 36] * 2)
    count(balance, 0, 0, 5)
    assert rounds.report() is first
    assert rounds.has_news
    rounds.rest()
    assert rounds.report().rows() == [[24, 6, 16]] * 2
    assert not rounds.has_news


def test_no_counts_are_lost_when_a_step_shares_them_while_a_thread_reads_others():
    balance = FakeBalance()
    rounds = ExpertRounds(balance)

    def share_one_more():
        rounds.before_step()
        count(balance, 1, 0, 0)
        rounds.rest()

    class Passed:
        """The step loop shares newer counts when the reader asks for this mark."""

        @property
        def is_passed(self):
            share_one_more()
            return True

    share_one_more()
    rounds._copy = replace(rounds._copy, mark=Passed())
    assert rounds.report().rows() == [[2, 0, 0]] * 2
    assert rounds.report().rows() == [[4, 0, 0]] * 2


def test_layers_move_one_a_step_with_the_tokens_since_the_last_time():
    balance = FakeBalance()
    rounds = ExpertRounds(balance, interval=4)
    for step in range(12):
        rounds.before_step()
        count(balance, 1, step, 0)
    window = [6, 2 * (0 + 1 + 2), 0]  # three steps were done when the fourth began, on two ranks
    later = [8, 2 * (3 + 4 + 5 + 6), 0]
    assert balance.moved == [(0, window), (1, window), (0, later), (1, later)]
    rounds.rest()
    assert rounds.report().num_moves == 12


def test_nothing_moves_without_an_interval_or_tokens():
    balance = FakeBalance()
    for rounds in (ExpertRounds(balance), ExpertRounds(balance, interval=1), ExpertRounds(None, interval=1)):
        for _ in range(5):
            rounds.before_step()
        rounds.rest()
    assert balance.moved == []
    assert rounds.report() is None


def test_a_recorded_load_comes_back_from_its_file(tmp_path):
    load = ExpertLoad(
        layers=[0, 2], num_experts=2, counts=np.array([1, 2, 3, 1 << 40]).astype("<i8").tobytes(), rank_ratios=[1, 1]
    )
    file = tmp_path / "load.json"
    file.write_bytes(msgspec.json.encode(record_of(load, ["m"])))
    assert read_load(file) == ((1, 2), (3, 1 << 40))


NEGATIVE = msgspec.json.encode(RecordedLoad(FORMAT, [], [RecordedLayer(0, [1, -1])])).decode()


@rows(
    "content, message",
    (None, "cannot be read as a recorded load"),
    ("{}", "cannot be read as a recorded load"),
    ('{"format": "x", "models": [], "layers": []}', "its format is 'x', not 'moe-serve expert load 1'"),
    (NEGATIVE, "tokens is negative"),
)
def test_other_files_are_refused_by_name(tmp_path, content, message):
    file = tmp_path / "load.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(EngineConfigError, match=f"eplb_load is .*{message}"):
        read_load(file)


@rows("name, value", ("num_redundant_experts", 4), ("eplb_load", "file"))
def test_settings_of_replicas_need_replicas(tmp_path, name, value):
    with pytest.raises(EngineConfigError, match=f"{name} is {value}: it needs enable_eplb"):
        EngineConfig(model=tmp_path, **{name: value})
    assert EngineConfig(model=tmp_path, enable_eplb=True, **{name: value})


def step_of(query_lens, most, *, scored=0):
    """A step whose rows have so many new tokens, of which the first wants `scored` logits."""
    step_rows = [
        StepRow(row, 0, length, True, scored if scored and row == 0 else 1) for row, length in enumerate(query_lens)
    ]
    num_tokens = sum(query_lens)
    numbers = np.arange(3 * num_tokens, dtype=np.int64).reshape(3, -1) % 50
    updates, none = np.zeros((0, 3), np.int32), np.zeros(0, np.int64)
    return StepBatch(step_rows, *numbers, updates, False, none, updates, False, most)


def test_data_parallel_ranks_pad_a_mixed_step_to_the_same_tokens(monkeypatch):
    """A prompt of 100 tokens here; few tokens, many rows, the log-probabilities of a prompt, or nothing there."""
    padded = []

    class Eager:
        device = torch.device("cpu")

        def plan(self, batch):
            """No attention here."""

        def __call__(self, batch, plan, kv):
            padded.append(batch.max_rank_tokens)

        def run_idle(self, max_rank_tokens, all_ranks_decode):
            padded.append(max_rank_tokens)

    class Noted:
        def replay(self, query_lens, seq_lens):
            padded.append(sum(query_lens))

    def rank(query_lens, most=100, **options):
        runner = core_with_graphs(monkeypatch, max_num_seqs=64, max_num_batched_tokens=2048, num_pages=64)._runner
        runner.model = Eager()
        graphs = runner.prompt_graphs
        graphs.run = lambda batch, size: padded.append(size.num_tokens)
        graphs._graphs = dict.fromkeys(graphs.sizes, Noted())
        if query_lens:
            runner._run_mixed(runner.make_batch(step_of(query_lens, most, **options)))
        else:
            runner.run_idle(most, False)

    rank([100])
    rank([1])
    rank([1] * 60)
    rank([50, 1], scored=50)
    rank([90], scored=90)
    rank([])
    assert padded == [128] * 6
    padded.clear()
    rank([200] * 6, 1200)
    rank([2], 1200)
    rank([], 1200)
    assert padded == [1200] * 3, "too many for a graph: no rank replays one"


def test_ranks_that_follow_hear_of_a_step_before_the_experts_of_all_move():
    """They take part in it; the other way round, both would wait for each other."""
    core, links = ranked_core(FakeModel())
    order = []
    links.send = lambda message: order.append(type(message).__name__)
    core._executor.rounds = SimpleNamespace(
        before_step=lambda: order.append("before step"), rest=lambda: order.append("rest"), has_news=True
    )
    run_all(core, [request("a", [1, 2], 2, ignore_eos=True)])
    assert order == ["StepBatch", "before step", "StepBatch", "before step", "Rest", "rest"]


def test_captured_steps_say_how_many_tokens_are_live(monkeypatch):
    core = core_with_graphs(monkeypatch, max_num_seqs=4)
    settings = core._runner.graphs._settings
    assert settings.buffers(8, 8).batch(
        (1,), query_start_B1=torch.zeros(2), logit_rows_R=torch.zeros(1), all_ranks_decode=True
    ).num_live is None, "nobody asks"  # fmt: skip
    settings.model.asks_num_live = True
    buffers = settings.buffers(8, 8)
    batch = buffers.batch((1,) * 4, query_start_B1=torch.zeros(5), logit_rows_R=torch.zeros(4), all_ranks_decode=True)
    few = replace(
        batch, input_ids_T=batch.input_ids_T[:3], positions_T=batch.positions_T[:3], slots_T=batch.slots_T[:3],
        query_lens=(1,) * 3, seq_lens_B=batch.seq_lens_B[:3], page_table_BP=batch.page_table_BP[:3],
    )  # fmt: skip
    buffers.fill(few)
    assert batch.num_live.tolist() == [3]
