"""A model divided among ranks answers as one rank does: every layout, both families, ranks as threads.

`make test` runs a pick of the layouts, `make ranks` the others.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.config import ModelSettings
from model.parallel import ParallelLayout
from model.registry import build_model
from moe.group import RankGroups
from moe.one_shot import try_one_shot
from moe.shared_memory import NUM_BYTES
from tests.emulators.symmetric import SymmetricMemory
from tests.model.parallel_cases import FOUR, TOLERANCE, TWO, expected, run_steps, worst_error
from tests.model.parallel_checkpoints import write_checkpoint
from tests.model.rank_threads import load_rank, run_layout

KINDS = ("gpt_oss", "deepseek", "deepseek_ragged")


PICK = ("tp2", "tp2-dp2-ep4", "tp4", "dp4-ep2")


@pytest.mark.parametrize("is_pick", [True, pytest.param(False, marks=pytest.mark.ranks)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_equals_one_rank(tmp_path: Path, subtests: pytest.Subtests, kind: str, is_pick: bool) -> None:
    """The self-check and the round trip of the exchange run while loading."""
    folder = write_checkpoint(kind, tmp_path / kind)
    alone = build_model(folder, ModelSettings(selfcheck="off"))
    for name, sizes in (TWO | FOUR).items():
        if (name in PICK) != is_pick:
            continue
        with subtests.test(name):

            def work(layout: ParallelLayout, groups: RankGroups) -> dict[str, torch.Tensor]:
                model = load_rank(folder, layout, groups, selfcheck="all")
                return run_steps(model, layout, agrees=layout.tp_size == 1)

            want = expected(alone, sizes.get("dp_size", 1))
            for rank, got in enumerate(run_layout(sizes, work)):
                assert worst_error(got, want[rank // sizes.get("tp_size", 1)]) < TOLERANCE


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_one_shot_sums_equal_one_rank(tmp_path: Path, kind: str, has_kernels: bool) -> None:
    """All sums of a step fit the kernels, and the layers in service write their parts where these read them."""
    folder = write_checkpoint(kind, tmp_path / kind)
    want = expected(build_model(folder, ModelSettings(selfcheck="off")), 1)[0]

    def work(layout: ParallelLayout, groups: RankGroups) -> dict[str, torch.Tensor]:
        memory = SymmetricMemory(groups.tp._rank, NUM_BYTES)  # type: ignore[attr-defined]
        tp = try_one_shot(groups.tp, memory, torch.device("cpu"))
        tp.has_kernels = has_kernels  # type: ignore[attr-defined]
        model = load_rank(folder, layout, replace(groups, tp=tp))
        assert {layer.quant_info.topology.allocator for layer in model.moe_layers} == {tp.empty}
        groups.tp.calls.clear()  # type: ignore[attr-defined]
        memory.num_sums = memory.num_norms = memory.num_gathers = 0
        logits = run_steps(model, layout, agrees=False)
        assert "all_reduce" not in groups.tp.calls  # type: ignore[attr-defined]
        num_sums = 2 * (1 + 2 * len(model.layers))  # the embedding's and two a layer, in two steps
        found = (memory.num_sums, memory.num_norms, memory.num_gathers)
        assert found == ((0, num_sums, 2) if has_kernels else (num_sums, 0, 0))
        return logits

    for got in run_layout({"tp_size": 2}, work):
        assert worst_error(got, want) < TOLERANCE
