"""Self-checks of FP8 block layers with several plans, in Triton's interpreter, faults in one plan's code at a time.

Prints JSON: by case, what is wrong with what the check said.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import torch

from moe import MoeA2ABackend, MoeBackend, MoeRunner, SelfCheckError, Topology
from moe.backends.triton.backend import TritonBackend, TritonMoeQuantInfo
from moe.backends.triton.plans import PlanTable
from moe.backends.triton.tactics import plan_text
from moe.check.selfcheck import check_layer
from moe.formats import ExpertWeights, Fp8BlockWeight
from moe.kernels import launch
from moe.kernels.plan import Plan
from moe.tune.measure import Measurer
from tests.moe.backends import hostile
from tests.moe.configs import rank_config

SIZE, TOP_K = 128, 2
DIRECT = Plan(is_direct=True, block_m=8, block_n_1=64, block_n_2=64)
BY_EXPERT = Plan(is_direct=True, block_m=16, block_n_1=128, block_n_2=128, by_expert=True)
GROUPED = Plan(is_direct=False, block_m=64, block_n_1=128, block_n_2=128, num_tile_heights=3)
FP8 = Plan(is_direct=False, block_m=16, block_n_1=128, block_n_2=128, fp8_activations=True)
TABLE = PlanTable(((4, DIRECT), (32, BY_EXPERT), (64, GROUPED), (None, FP8)))
NO_BF16_GROUPED = PlanTable(((8, DIRECT), (None, FP8)))
RUN = launch.run_layer
Fault = Callable[[Plan, Any, torch.Tensor], Any]  # of plan, layer and ids to what results are multiplied with


class Case:
    """A layer and its plans."""

    def __init__(self, plans: PlanTable, num_experts: int = 3, a2a: MoeA2ABackend = MoeA2ABackend.NONE) -> None:
        w13, w2 = (Fp8BlockWeight.quantize(w) for w in hostile.dense_experts(num_experts, SIZE, SIZE))
        self.experts, self.topology, self.plans = ExpertWeights(w13=w13, w2=w2), Topology(a2a=a2a), plans
        config = rank_config(num_experts=num_experts, hidden_size=SIZE, intermediate_size=SIZE, top_k=TOP_K)
        self.runner = MoeRunner(MoeBackend.TRITON, a2a, config)
        self.info = self.prepared(self.experts)

    def prepared(self, experts: ExpertWeights) -> TritonMoeQuantInfo:
        info = TritonBackend().prepare(experts, self.runner.config, self.topology)
        return dataclasses.replace(info, plans=self.plans)

    def check(self, fault: Fault | None = None, info: TritonMoeQuantInfo | None = None) -> str:
        """What the self-check says; of an intact layer the error and tolerance of the worst plan."""
        with_fault(fault)
        try:
            report = check_layer(self.runner, info or self.info, self.experts, layer=1, topology=self.topology)
            return f"{report.worst_error} of {report.tolerance}"
        except SelfCheckError as error:
            return str(error)

    def wrong_scale(self, expert: int) -> str:
        """What is said of a layer with one wrong block scale of w2."""
        scale = self.experts.w2.scale_inv.clone()
        scale[expert, 0, 0] *= 2
        wrong = dataclasses.replace(self.experts, w2=Fp8BlockWeight(self.experts.w2.data, scale))
        return self.check(info=self.prepared(wrong))

    def tuning_error(self, plan: Plan, fault: Fault | None = None) -> float:
        """What tuning finds at 24 tokens, as a share of the tolerance."""
        with_fault(fault)
        return Measurer(self.runner, self.info, self.experts, self.topology).error(plan_text(plan), 24)


def with_fault(fault: Fault | None) -> None:
    """From now on kernels give results multiplied with what `fault` says."""

    def run(x: Any, ids: torch.Tensor, weights: Any, layer: Any, plan: Plan, out: torch.Tensor, **options: Any) -> None:
        RUN(x, ids, weights, layer, plan, out, **options)
        if fault is not None:
            out *= fault(plan, layer, ids)

    launch.run_layer = run


def code_of(plan: Plan) -> Fault:
    """A fault of this plan only."""
    return lambda used, layer, ids: 1.1 if used == plan else 1.0


def everywhere(factor: float) -> Fault:
    return lambda used, layer, ids: factor


def masked(factor: float) -> Fault:
    """A fault of masked rows only."""
    return lambda used, layer, ids: factor if layer.top_k == 1 else 1.0


def tile_of(plan: Plan, low: int, high: int) -> Fault:
    """A fault of this plan only, and only for an expert with more than `low` and at most `high` rows."""

    def factor(used: Plan, layer: Any, ids: torch.Tensor) -> Any:
        if used != plan:
            return 1.0
        count = torch.bincount(ids[ids >= 0], minlength=layer.num_experts)
        is_hit = ((count > low) & (count <= high))[ids.clamp(min=0)] & (ids >= 0)
        return torch.where(is_hit.any(1, keepdim=True), 1.1, 1.0)

    return factor


def intact(text: str, low: float, high: float, tolerance: float) -> str:
    """What is wrong with the verdict on an intact layer, if anything; so are the next two."""
    error, _, limit = text.partition(" of ")
    return "" if limit == str(tolerance) and low < float(error) < high else text


def found(text: str, pattern: str) -> str:
    """`*` stands for what may differ: the group of tokens that decides."""
    return "" if fnmatch(text, f"layer 1, triton/{pattern}*") else text


def between(low: float, share: float, high: float) -> str:
    return "" if low < share < high else str(share)


def main(part: str) -> dict[str, str]:
    """One fault of a kernel, one of weights and one of a tuned plan, and each intact layer; or all the others."""
    layer, own = Case(TABLE), "none/fp8_block: expert"
    deepep = Case(NO_BF16_GROUPED, a2a=MoeA2ABackend.DEEPEP)
    by_direct = "direct plan 8 x 64 (up to 4 tokens); the tolerance is 0.015"
    by_expert = "direct plan 16 x 128 (up to 32 tokens); the tolerance is 0.015"
    by_grouped = "grouped plan 64 x 128 (up to 64 tokens); the tolerance is 0.015"
    by_fp8 = "grouped plan 16 x 128 (FP8 activations, any number of tokens); the tolerance is 0.08"
    if part == "pick":
        return {
            "intact": intact(layer.check(), 0, 0.015, 0.015),
            "intact, FP8 activations alone": intact(Case(PlanTable(((None, FP8),))).check(), 0, 0.04, 0.08),
            "grouped": found(layer.check(code_of(GROUPED)), f"{own} 0 differs*{by_grouped}"),
            "wrong scale": found(Case(TABLE, num_experts=8).wrong_scale(3), f"{own} 3 differs*{by_grouped}"),
            "tuning grouped": between(0.05, layer.tuning_error(GROUPED), 1),
            "tuning FP8 activations": between(0.05, layer.tuning_error(FP8), 1),
            "tuning a wrong grouped": between(1, layer.tuning_error(GROUPED, everywhere(1.04)), 4),
            "tuning wrong FP8 activations": between(1, layer.tuning_error(FP8, everywhere(1.1)), 4),
        }

    return {
        "intact behind DeepEP": intact(deepep.check(), 0, 0.015, 0.015),
        "is_direct": found(layer.check(code_of(DIRECT)), f"{own} 0 differs*{by_direct}"),
        "FP8 activations": found(layer.check(code_of(FP8)), f"{own} * differs*{by_fp8}"),
        "second tile of a direct plan": found(layer.check(tile_of(BY_EXPERT, 16, 32)), f"{own} 0 differs*{by_expert}"),
        "whole tile": found(layer.check(tile_of(GROUPED, 32, 99)), f"{own} 0 differs*{by_grouped}"),
        "half a tile": found(layer.check(tile_of(GROUPED, 16, 32)), f"{own} * differs*{by_grouped}"),
        "direct behind DeepEP": found(
            deepep.check(code_of(DIRECT)), "deepep/fp8_block (deepep_normal): expert 0 differs*8 x 64 (up to 8 tokens)"
        ),
        "masked rows": found(deepep.check(masked(1.1)), f"deepep/fp8_block (deepep_ll): expert * differs*{by_fp8}"),
        "tuning a wrong direct before FP8 ones": between(1, deepep.tuning_error(DIRECT, everywhere(1.04)), 4),
        "tuning wrong masked rows": between(1, deepep.tuning_error(GROUPED, masked(1.04)), 4),
    }


if __name__ == "__main__":
    json.dump(main(sys.argv[1]), sys.stdout)
