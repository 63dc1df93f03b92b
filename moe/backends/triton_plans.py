"""Which launch plan a layer uses for how many tokens: the measured tables first, a rule where nothing was measured.

Tables are keyed by GPU name, number format and shape; their file says where the numbers come from.
"""

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from moe.errors import MoeConfigError
from moe.kernels.plan import Plan

TABLE = "triton_plans.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """Everything a plan may depend on; sizes are this rank's."""

    gpu: str
    format_name: str
    num_experts: int
    num_local_experts: int
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
        if self.steps[-1][1].direct:
            raise MoeConfigError("a direct plan cannot be the one without a bound")

    def pick(self, num_tokens: int, *, may_be_direct: bool = True) -> Plan:
        """The plan of the first bound that is not below `num_tokens`; only grouped ones unless `may_be_direct`."""
        for bound, plan in self.steps:
            if (bound is None or num_tokens <= bound) and (may_be_direct or not plan.direct):
                return plan
        raise MoeConfigError("a plan table without an open end")


def plans_for(shape: LayerShape) -> PlanTable:
    """The measured table of this GPU and shape, else the rule."""
    for entry in json.loads(resources.files("moe.tables").joinpath(TABLE).read_text(encoding="utf-8"))["tables"]:
        if all(getattr(shape, field) == value for field, value in entry["match"].items()):
            return PlanTable(tuple((step["max_tokens"], Plan(**step["plan"])) for step in entry["steps"]))
    return PlanTable(_rule(shape))


def device_name(device: torch.device) -> str:
    """Name under which tables know a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _rule(shape: LayerShape) -> tuple[tuple[int | None, Plan], ...]:
    """Tiles that hold the mean number of rows per expert, narrow weight tiles while there are few programs."""
    steps: list[tuple[int | None, Plan]] = []
    for bound, block_m in ((8, 8), (16, 16)):
        steps.append((bound, Plan(direct=True, block_m=block_m, block_n_1=64, block_n_2=64, split_k=2)))
    for block_m in (16, 32, 64):
        bound = block_m * shape.num_experts // shape.top_k * 3 // 4
        if bound > 16:
            steps.append((bound, _grouped(block_m)))
    steps.append((None, _grouped(64)))
    return tuple(steps)


def _grouped(block_m: int) -> Plan:
    sizes: dict[str, Any] = {"block_n_1": 128, "block_n_2": 128, "stages_1": 3, "stages_2": 3}
    return Plan(direct=False, block_m=block_m, **sizes)
