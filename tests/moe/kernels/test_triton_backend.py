"""The backend's refusals and its choice of launch plans; needs no GPU."""

import json
from dataclasses import replace
from importlib import resources

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, MoeConfigError, MoeRunner, MoeRunnerConfig, UnsupportedPathError
from moe.backends.base import Device
from moe.backends.triton import TritonBackend
from moe.backends.triton_plans import LayerShape, PlanTable, plans_for
from moe.formats import Bf16Weight, ExpertWeights
from moe.kernels.plan import MAX_DIRECT_SLOTS, Plan
from moe.topology import Topology
from tests.moe.backends import hostile

CONFIG = MoeRunnerConfig(num_experts=8, num_local_experts=8, hidden_size=64, intermediate_size=64, top_k=2)
SHAPE = LayerShape(
    gpu="a GPU nobody measured", format_name="mxfp4", num_experts=32, num_local_experts=32, top_k=4,
    hidden_size=2880, intermediate_size=2880,
)  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "format_name", "a2a", "reason"),
    [
        ("sm90", "mxfp4", MoeA2ABackend.NONE, None),
        ("sm80", "nvfp4", MoeA2ABackend.NONE, None),
        ("cpu", "mxfp4", MoeA2ABackend.NONE, "device cpu"),
        ("sm75", "mxfp4", MoeA2ABackend.NONE, "no bf16 tensor cores"),
        ("sm90", "fp8_tensor", MoeA2ABackend.NONE, "format fp8_tensor"),
        ("sm90", "mxfp4", MoeA2ABackend.MORI, "transport mori"),
    ],
)
def test_supports_answers_with_none_or_a_reason(
    arch: str, format_name: str, a2a: MoeA2ABackend, reason: str | None
) -> None:
    answer = TritonBackend().supports(Device(arch=arch), format_name, a2a, CONFIG)
    assert answer is None if reason is None else reason in str(answer)


def test_the_verdict_ignores_what_is_installed_and_prepare_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "is_installed", lambda self: False)
    assert TritonBackend().supports(Device(arch="sm90"), "mxfp4", MoeA2ABackend.NONE, CONFIG) is None
    w13, w2 = (Bf16Weight(part.bfloat16()) for part in hostile.dense_experts(8, 64, 64))
    with pytest.raises(UnsupportedPathError, match="needs the package triton; install the extra 'gpu'"):
        TritonBackend().prepare(ExpertWeights(w13=w13, w2=w2), CONFIG, Topology())


def test_other_activation_dtypes_are_refused_when_the_runner_is_built() -> None:
    with pytest.raises(UnsupportedPathError, match="float16"):
        MoeRunner(MoeBackend.TRITON, MoeA2ABackend.NONE, replace(CONFIG, dtype=torch.float16))


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 16, 17, 64, 500, 100_000])
@pytest.mark.parametrize(("num_experts", "top_k"), [(32, 4), (256, 8), (4, 2), (1, 1)])
def test_the_rule_has_a_fitting_plan_for_every_token_count(num_tokens: int, num_experts: int, top_k: int) -> None:
    shape = replace(SHAPE, num_experts=num_experts, num_local_experts=num_experts, top_k=top_k)
    plan = plans_for(shape).pick(num_tokens)
    assert plan.direct == (num_tokens <= 16)
    assert not plan.direct or num_tokens * top_k <= MAX_DIRECT_SLOTS


def test_measured_tables_are_found_by_their_own_keys() -> None:
    tables = json.loads(resources.files("moe.tables").joinpath("triton_plans.json").read_text(encoding="utf-8"))[
        "tables"
    ]
    for entry in tables:
        shape = replace(SHAPE, **entry["match"])
        assert plans_for(shape).steps[0][1] == Plan(**entry["steps"][0]["plan"])


def test_plans_that_contradict_themselves_are_refused() -> None:
    plan = Plan(direct=True, block_m=8, block_n_1=64, block_n_2=64)
    with pytest.raises(MoeConfigError, match="the one without a bound"):
        PlanTable(((None, plan),))
    with pytest.raises(MoeConfigError, match="needs bounds"):
        PlanTable(((9, plan),))
    with pytest.raises(MoeConfigError, match="block_n_1 is 48"):
        replace(plan, block_n_1=48)
    with pytest.raises(MoeConfigError, match="prefetch needs pdl"):
        replace(plan, prefetch=True)
    with pytest.raises(MoeConfigError, match="belong to direct plans"):
        replace(plan, direct=False, split_k=2)
