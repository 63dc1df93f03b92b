"""The launch plan of a layer by token count, from measured tables, or by a rule if there are none. Measures nothing.

A shape without measurements takes the plans of the nearest measured shape of the same GPU architecture and number
format, with token counts scaled to give an expert the same number of rows.
"""

import math
from dataclasses import dataclass, replace

from moe.errors import MoeConfigError
from moe.kernels.plan import MAX_DIRECT_SLOTS, Plan
from moe.tables import read_entries, size_distance

TABLE = "triton_plans.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """Everything a plan depends on. `arch` as in `Device`; experts of all ranks; sizes of this rank."""

    arch: str
    format_name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class PlanTable:
    """Plans by token count, smallest bound first; the last one has no bound."""

    steps: tuple[tuple[int | None, Plan], ...]

    def __post_init__(self) -> None:
        bounds = [bound for bound, _ in self.steps]
        if not bounds or bounds[-1] is not None or None in bounds[:-1]:
            raise MoeConfigError("a plan table needs bounds on all plans but the last")
        if self.steps[-1][1].is_direct:
            raise MoeConfigError("a direct plan cannot be the one without a bound")

    def pick(self, num_tokens: int, *, may_be_direct: bool = True) -> Plan:
        """The plan of the first bound >= `num_tokens`; only grouped plans unless `may_be_direct`."""
        for bound, plan in self.steps:
            if (bound is None or num_tokens <= bound) and (may_be_direct or not plan.is_direct):
                return plan
        raise MoeConfigError("a plan table without an open end")


def plans_for(shape: LayerShape) -> PlanTable:
    """The nearest measured table, its bounds moved to this shape's experts and top-k, else the rule."""
    entries = [
        entry for entry in read_entries(TABLE) if (entry["arch"], entry["format"]) == (shape.arch, shape.format_name)
    ]
    if not entries:
        return _table(_rule(shape), shape.top_k)
    entry = min(entries, key=lambda entry: _distance(entry["shape"], shape))
    measured = entry["shape"]
    same_rows = shape.num_experts * measured["top_k"] / (measured["num_experts"] * shape.top_k)
    steps: list[tuple[int | None, Plan]] = []
    for step in entry["steps"]:
        plan, bound = Plan(**step["plan"]), step["max_tokens"]
        if bound is not None:
            few, bound = bound * measured["top_k"] // shape.top_k, max(1, round(bound * same_rows))
            if plan.split_k_1 > 1 and few < bound:  # parts are for few programs, whose number follows that of slots
                steps.append((max(1, few), plan))
                plan = replace(plan, split_k_1=1)
        steps.append((bound, plan))
    return _table(steps, shape.top_k)


def _table(steps: list[tuple[int | None, Plan]], top_k: int) -> PlanTable:
    """Cap direct plans at their slot limit, and drop steps that would be compiled but never picked."""
    kept: list[tuple[int | None, Plan]] = []
    before = 0
    for bound, plan in steps:
        end = bound if bound is None or not plan.is_direct else min(bound, MAX_DIRECT_SLOTS // top_k)
        if end is None or end > before:
            kept.append((end, plan))
            before = end or before
    return PlanTable(tuple(kept))


def _distance(measured: dict[str, int], shape: LayerShape) -> tuple[float, float]:
    """Sort key: distance in expert size, then in number of experts."""
    by_number = abs(math.log(shape.num_experts / measured["num_experts"]))
    return size_distance(measured, shape.hidden_size, shape.intermediate_size), by_number


def _rule(shape: LayerShape) -> list[tuple[int | None, Plan]]:
    """Tiles that hold the mean number of rows per expert, small enough for the shared memory of every GPU we know."""
    steps: list[tuple[int | None, Plan]] = []
    for bound, block_m in ((8, 8), (16, 16)):
        steps.append((bound, Plan(is_direct=True, block_m=block_m, block_n_1=64, block_n_2=64, split_k=2)))
    for block_m in (16, 32, 64):
        bound = block_m * shape.num_experts // shape.top_k * 3 // 4
        if bound > 16:
            steps.append((bound, _grouped(block_m)))
    steps.append((None, _grouped(64)))
    return steps


def _grouped(block_m: int) -> Plan:
    return Plan(
        is_direct=False, block_m=block_m, block_n_1=128, block_n_2=128, num_stages_1=3, num_stages_2=3
    )  # fmt: skip
