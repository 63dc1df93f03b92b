"""Self-checks of FP8 block layers with several plans, in Triton's interpreter, faults in one plan's code at a time.

Prints JSON: by case, what the check said. A program of its own, since Triton decides when it is imported whether it
compiles or interprets.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from moe import MoeA2ABackend, MoeBackend, MoeRunner, MoeRunnerConfig, SelfCheckError, Topology
from moe.backends.triton.backend import TritonBackend, TritonMoeQuantInfo
from moe.backends.triton.plans import PlanTable
from moe.backends.triton.tactics import plan_text
from moe.check.selfcheck import check_layer
from moe.formats import ExpertWeights, Fp8BlockWeight
from moe.kernels import launch
from moe.kernels.plan import Plan
from moe.tune.measure import Measurer
from tests.moe.backends import hostile

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
        config = MoeRunnerConfig(
            num_experts=num_experts, num_local_experts=num_experts, hidden_size=SIZE, intermediate_size=SIZE,
            top_k=TOP_K,
        )  # fmt: skip
        self.runner = MoeRunner(MoeBackend.TRITON, a2a, config)
        self.info = self.prepared(self.experts)

    def prepared(self, experts: ExpertWeights) -> TritonMoeQuantInfo:
        info = TritonBackend().prepare(experts, self.runner.config, self.topology)
        return dataclasses.replace(info, plans=self.plans)

    def check(self, fault: Fault | None = None, info: TritonMoeQuantInfo | None = None) -> Any:
        """Error and tolerance, or the message."""
        with_fault(fault)
        try:
            report = check_layer(self.runner, info or self.info, self.experts, layer=1, topology=self.topology)
            return [report.worst_error, report.tolerance]
        except SelfCheckError as error:
            return str(error)

    def wrong_scale(self, expert: int) -> Any:
        """What is said of a layer with one wrong block scale of w2."""
        w2 = self.experts.w2
        scale = w2.scale_inv.clone()
        scale[expert, 0, 0] *= 2
        wrong = dataclasses.replace(self.experts, w2=Fp8BlockWeight(w2.data, scale))
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


def tile_of(plan: Plan, low: int, high: int) -> Fault:
    """A fault of this plan only, and only for an expert with more than `low` and at most `high` rows."""

    def factor(used: Plan, layer: Any, ids: torch.Tensor) -> Any:
        if used != plan:
            return 1.0
        count = torch.bincount(ids[ids >= 0], minlength=layer.num_experts)
        is_hit = ((count > low) & (count <= high))[ids.clamp(min=0)] & (ids >= 0)
        return torch.where(is_hit.any(1, keepdim=True), 1.1, 1.0)

    return factor


def main() -> dict[str, Any]:
    """Every case."""
    layer = Case(TABLE)
    deepep = Case(NO_BF16_GROUPED, a2a=MoeA2ABackend.DEEPEP)
    return {
        "intact": layer.check(),
        "intact, FP8 activations alone": Case(PlanTable(((None, FP8),))).check(),
        "intact behind DeepEP": deepep.check(),
        "is_direct": layer.check(code_of(DIRECT)),
        "grouped": layer.check(code_of(GROUPED)),
        "FP8 activations": layer.check(code_of(FP8)),
        "second tile of a direct plan": layer.check(tile_of(BY_EXPERT, 16, 32)),
        "whole tile": layer.check(tile_of(GROUPED, 32, 99)),
        "half a tile": layer.check(tile_of(GROUPED, 16, 32)),
        "direct behind DeepEP": deepep.check(code_of(DIRECT)),
        "masked rows": deepep.check(lambda plan, layer, ids: 1.1 if layer.top_k == 1 else 1.0),
        "wrong scale": Case(TABLE, num_experts=8).wrong_scale(3),
        "tuning grouped": layer.tuning_error(GROUPED),
        "tuning FP8 activations": layer.tuning_error(FP8),
        "tuning a wrong grouped": layer.tuning_error(GROUPED, lambda plan, layer, ids: 1.04),
        "tuning wrong FP8 activations": layer.tuning_error(FP8, lambda plan, layer, ids: 1.1),
        "tuning a wrong direct before FP8 ones": deepep.tuning_error(DIRECT, lambda plan, layer, ids: 1.04),
        "tuning wrong masked rows": deepep.tuning_error(
            GROUPED, lambda plan, layer, ids: 1.04 if layer.top_k == 1 else 1.0
        ),
    }


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
