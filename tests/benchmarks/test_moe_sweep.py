"""The search of launch plans as far as a CPU can see it: where it sets out, and that it takes the best of each part."""

import dataclasses
from typing import Any

import pytest
import torch

from benchmarks import moe_sweep
from benchmarks.moe_cases import CASES
from moe.kernels.plan import MAX_DIRECT_SLOTS, Plan


@pytest.mark.parametrize("tokens", [1, 4, 8, 16, 64, 256, 1024, 4096])
@pytest.mark.parametrize("model", CASES)
def test_every_case_has_plans_to_set_out_from(model: str, tokens: int) -> None:
    case = CASES[model]
    plans = moe_sweep.starts(tokens, case.num_experts, case.top_k, "fp8_block")
    assert plans
    assert all(not plan.direct or tokens * case.top_k <= MAX_DIRECT_SLOTS for plan in plans)
    assert any(plan.fp8_activations for plan in plans) == any(plan.block_m >= 64 for plan in plans)
    if tokens >= 1024:
        assert not any(plan.direct for plan in plans), "the last step of a table cannot be direct"
    for plan in plans:
        ones, twos = moe_sweep.first_round(plan)
        assert all(moe_sweep._changed(plan, change) is not None for change in ones + twos)


def test_the_best_change_of_either_matrix_is_combined_and_plans_that_do_not_run_give_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def time(plan: Plan, layers: Any, x: torch.Tensor, topks: Any) -> float:
        if plan.stages_1 == 6:  # would be the fastest, but does not launch
            return float("inf")
        return 100.0 - 10 * (plan.block_n_1 == 128) - 5 * (plan.split_k == 1) - (plan.warps_2 == 2)

    monkeypatch.setattr(moe_sweep, "_time", time)
    layer: Any = dataclasses.make_dataclass("Layer", ["num_experts", "top_k"])(32, 4)
    rows = list(moe_sweep.sweep([layer], torch.empty(1, 8), [], "mxfp4"))
    best = min(rows, key=lambda row: row["us"])
    plan = Plan(**best["plan"])
    assert (plan.block_n_1, plan.split_k, plan.warps_2, best["us"]) == (128, 1, 2, 84.0)
    assert all(row["plan"]["stages_1"] != 6 for row in rows)
    assert len({Plan(**row["plan"]) for row in rows}) == len(rows)
