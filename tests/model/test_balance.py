"""Experts with replicas on several ranks: the answers of one rank, counters that add up, moves between two steps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from model.balance import BalanceSettings
from model.config import ModelSettings, ModelSettingsError
from model.parallel import ParallelLayout
from model.registry import build_model
from moe import MoeA2ABackend, MoeBackend
from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings
from moe.errors import MoeConfigError, UnsupportedPathError
from moe.group import RankGroups
from moe.registry import load_backend
from tests.emulators.deepep import install_deepep
from tests.model.parallel_cases import TOLERANCE, expected, run_steps, worst_error
from tests.model.parallel_checkpoints import write_checkpoint
from tests.model.rank_threads import ThreadGroup, load_rank, run_layout
from tests.tables import rows

ON = BalanceSettings(has_replicas=True)
LIMIT = 20
Answers = dict[str, torch.Tensor]


def run_balanced(folder: Path, sizes: dict[str, int], **settings: Any) -> list[tuple[Answers, Answers, Any]]:
    """Of each rank: answers before and after two new placements, and what its counters and experts came to."""

    def work(layout: ParallelLayout, groups: RankGroups) -> tuple[Answers, Answers, Any]:
        model = load_rank(folder, layout, groups, balance=ON, max_num_tokens=LIMIT, **settings)
        world, balance = ThreadGroup(groups.world), model.balance  # type: ignore[arg-type]
        assert balance is not None
        before = run_steps(model, layout)
        counted = balance.total(world).tolist()
        num_moves = 0
        for busy in (0, 1):  # first one half of the experts is busy, then the other
            for index in range(len(balance.layers)):
                load = [1 + 100 * (expert % 2 == busy) for expert in range(balance.num_experts)]
                num_moves += balance.rebalance(index, load, world)
                loads = balance.rank_loads(index, load)
                assert max(loads) <= 1.1 * min(loads)
        assert [row for row in balance.total(world).tolist() if sum(row)] == [row for row in counted if sum(row)]
        return before, run_steps(model, layout), (counted, num_moves)

    return run_layout(sizes, work)


def check(folder: Path, sizes: dict[str, int], results: list[tuple[Answers, Answers, Any]]) -> None:
    alone = build_model(folder, ModelSettings(selfcheck="off", balance=BalanceSettings(counts=True)))
    want = expected(alone, sizes.get("dp_size", 1))
    assert alone.balance is not None
    for rank, (before, after, (counted, num_moves)) in enumerate(results):
        own = want[rank // sizes.get("tp_size", 1)]
        assert worst_error(before, own) < TOLERANCE
        assert worst_error(after, own) < TOLERANCE
        assert counted == alone.balance.total().tolist(), "every token counts once, on whichever rank"
        assert num_moves > 0


@rows(
    "kind, sizes",
    ("gpt_oss", {"tp_size": 2, "ep_size": 2}),
    ("gpt_oss", {"tp_size": 2, "dp_size": 2, "ep_size": 2}),
    ("deepseek", {"dp_size": 2, "ep_size": 2}),
    ("deepseek", {"tp_size": 4, "ep_size": 4}),
)
def test_replicas_that_move_equal_one_rank(tmp_path: Path, kind: str, sizes: dict[str, int]) -> None:
    folder = write_checkpoint(kind, tmp_path / kind)
    check(folder, sizes, run_balanced(folder, sizes, selfcheck="all"))


@rows(
    "kind, mode, sizes",
    ("gpt_oss", DeepepMode.AUTO, {"tp_size": 2, "ep_size": 2}),
    ("deepseek", DeepepMode.NORMAL, {"dp_size": 2, "ep_size": 2}),
)
def test_a_transport_knows_slots_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, mode: DeepepMode, sizes: dict[str, int]
) -> None:
    install_deepep(monkeypatch, wide=True)
    folder = write_checkpoint(kind, tmp_path / kind)
    deepep = DeepepSettings(mode=mode, max_dispatch_tokens=LIMIT)
    check(folder, sizes, run_balanced(folder, sizes, moe_a2a_backend=MoeA2ABackend.DEEPEP, deepep=deepep))


def test_a_recorded_load_places_the_experts_at_load(tmp_path: Path) -> None:
    folder = write_checkpoint("gpt_oss", tmp_path / "gpt_oss")
    shape = build_model(folder, ModelSettings(balance=BalanceSettings(counts=True))).balance
    assert shape is not None
    num_layers, num_experts = shape.counts_LE.shape
    load = tuple(tuple(1000 if expert == 2 else 1 for expert in range(num_experts)) for _ in range(num_layers))

    def placements(layout: ParallelLayout, groups: RankGroups) -> list[Any]:
        settings = BalanceSettings(has_replicas=True, load=load)
        balance = load_rank(folder, layout, groups, balance=settings).balance
        assert balance is not None
        return [layer.placement.experts for layer in balance.layers]

    for placed in run_layout({"tp_size": 2, "ep_size": 2}, placements):
        assert all(2 in experts for layer in placed for experts in layer)
    wrong = BalanceSettings(has_replicas=True, load=load[:1])
    with pytest.raises(ModelSettingsError, match=f"eplb_load has 1 layers of {num_experts} experts, but this model"):
        wrong.first_placements(num_layers, num_experts, ParallelLayout(tp_size=2, ep_size=2))


def test_what_cannot_be_balanced_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelSettingsError, match="enable_eplb is set, but expert_parallel_size is 1"):
        ModelSettings(balance=ON, layout=ParallelLayout(tp_size=2))
    folder = write_checkpoint("gpt_oss", tmp_path / "gpt_oss")
    two = {"tp_size": 2, "ep_size": 2}
    odd = BalanceSettings(has_replicas=True, num_redundant=1)
    with pytest.raises(MoeConfigError, match=r"num_redundant_experts is 1: .* multiple of the 2 expert-parallel ranks"):
        run_layout(two, lambda layout, groups: load_rank(folder, layout, groups, balance=odd))
    monkeypatch.setattr(type(load_backend(MoeBackend.TORCH)), "can_move_experts", False)
    with pytest.raises(UnsupportedPathError, match="enable_eplb is set, but --moe-backend torch cannot exchange"):
        run_layout(two, lambda layout, groups: load_rank(folder, layout, groups, balance=ON))
