"""The backend's refusals and its choice of launch plans; needs no GPU."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, MoeConfigError, MoeRunner, UnsupportedPathError
from moe.backends.triton import plans as triton_plans
from moe.backends.triton.backend import TritonBackend
from moe.backends.triton.plans import LayerShape, PlanTable, plans_for
from moe.config import DispatchFormat
from moe.device import Device
from moe.formats import Bf16Weight, ExpertWeights, activation_quant
from moe.kernels.plan import MAX_DIRECT_SLOTS, Plan
from moe.tables import read_entries
from moe.topology import Topology
from tests.moe.backends import hostile
from tests.moe.configs import rank_config

FORMATS = ("bf16", "fp8_block", "mxfp4", "nvfp4")
CONFIG = rank_config(num_experts=8, hidden_size=64, intermediate_size=64, top_k=2)
SHAPE = LayerShape(
    arch="sm70", format_name="mxfp4", num_experts=32, top_k=4, hidden_size=2880, intermediate_size=2880
)  # fmt: skip


def test_supports_answers_with_none_or_a_reason(subtests: pytest.Subtests) -> None:
    for arch, format_name, a2a, reason in [
        ("sm90", "mxfp4", MoeA2ABackend.NONE, None),
        ("sm80", "nvfp4", MoeA2ABackend.NONE, None),
        ("cpu", "mxfp4", MoeA2ABackend.NONE, "device cpu"),
        ("sm75", "mxfp4", MoeA2ABackend.NONE, "no bf16 tensor cores"),
        ("sm90", "fp8_tensor", MoeA2ABackend.NONE, "format fp8_tensor"),
        ("sm90", "mxfp4", MoeA2ABackend.MORI, "transport mori"),
    ]:
        with subtests.test(arch=arch, format_name=format_name, a2a=a2a, reason=reason):
            answer = TritonBackend().supports(Device(arch=arch), format_name, a2a, CONFIG)
            assert answer is None if reason is None else reason in str(answer)


def test_the_verdict_ignores_what_is_installed_and_prepare_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "is_installed", lambda self: False)
    assert TritonBackend().supports(Device(arch="sm90"), "mxfp4", MoeA2ABackend.NONE, CONFIG) is None
    with pytest.raises(
        UnsupportedPathError, match="needs the package triton, which is not installed: pip install triton"
    ):
        TritonBackend().prepare(hostile.plain_experts("bf16", 8, 64, 64), CONFIG, Topology())


def test_other_activation_dtypes_are_refused_when_the_runner_is_built() -> None:
    with pytest.raises(UnsupportedPathError, match="float16"):
        MoeRunner(MoeBackend.TRITON, MoeA2ABackend.NONE, replace(CONFIG, dtype=torch.float16))


def test_the_rule_has_a_fitting_plan_for_every_token_count(subtests: pytest.Subtests) -> None:
    tokens = (1, 8, 9, 16, 17, 64, 500, 100_000)
    for (num_experts, top_k), num_tokens in itertools.product([(32, 4), (256, 8), (4, 2), (1, 1)], tokens):
        with subtests.test(num_experts=num_experts, num_tokens=num_tokens):
            plan = plans_for(replace(SHAPE, num_experts=num_experts, top_k=top_k)).pick(num_tokens)
            assert plan.is_direct == (num_tokens <= 16)
            assert not plan.is_direct or num_tokens * top_k <= MAX_DIRECT_SLOTS


def test_a_measured_shape_gets_its_own_plans(subtests: pytest.Subtests) -> None:
    entries = read_entries(triton_plans.TABLE)
    assert entries
    for entry in entries:
        shape = LayerShape(arch=entry["arch"], format_name=entry["format"], **entry["shape"])
        with subtests.test(shape=shape):
            steps = [(step["max_tokens"], Plan(**step["plan"])) for step in entry["steps"]]
            assert list(plans_for(shape).steps) == steps
            assert all(not plan.is_direct or bound * shape.top_k <= MAX_DIRECT_SLOTS for bound, plan in steps)


def test_an_unmeasured_shape_takes_the_nearest_plans_at_as_many_rows_per_expert(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(size: int, num_experts: int, block_n: int) -> dict[str, Any]:
        is_direct = {"is_direct": True, "block_m": 8, "block_n_1": block_n, "block_n_2": 64}
        grouped = {"is_direct": False, "block_m": 16, "block_n_1": block_n, "block_n_2": 64}
        shape = {"num_experts": num_experts, "top_k": 4, "hidden_size": size, "intermediate_size": size}
        steps = [{"max_tokens": 8, "plan": is_direct}, {"max_tokens": 256, "plan": grouped},
                 {"max_tokens": None, "plan": grouped}]  # fmt: skip
        return {"arch": "sm90", "format": "mxfp4", "shape": shape, "steps": steps}

    tables = [entry(1024, 32, 64), entry(2880, 32, 128), entry(2880, 128, 256)]
    monkeypatch.setattr(triton_plans, "read_entries", lambda name: tables)
    shape = replace(SHAPE, arch="sm90")
    assert plans_for(shape).steps[0][1].block_n_1 == 128
    assert plans_for(replace(shape, num_experts=256)).steps[0][1].block_n_1 == 256
    assert plans_for(replace(shape, hidden_size=1000)).steps[0][1].block_n_1 == 64
    assert [bound for bound, _ in plans_for(replace(shape, num_experts=64, top_k=2)).steps] == [32, 1024, None]
    many = plans_for(replace(shape, num_experts=128 * 64, top_k=4))
    assert [bound for bound, _ in many.steps] == [MAX_DIRECT_SLOTS // 4, 16384, None]
    assert plans_for(replace(shape, arch="sm80")) == plans_for(replace(shape, format_name="bf16"))
    assert [bound for bound, _ in plans_for(replace(shape, num_experts=1, top_k=1)).steps] == [1, 32, None]


def test_parts_of_the_first_matrix_stay_with_the_slots_that_they_were_measured_for() -> None:
    """More experts have fewer rows each at as many tokens, but no fewer programs."""
    two_ranks = LayerShape(
        arch="sm90", format_name="mxfp4", num_experts=32, top_k=4, hidden_size=2880, intermediate_size=1440
    )
    measured = plans_for(two_ranks)
    assert [measured.pick(num_tokens).split_k_1 for num_tokens in (1, 2, 3)] == [2, 2, 1]
    many = plans_for(replace(two_ranks, num_experts=128))
    assert [many.pick(num_tokens).split_k_1 for num_tokens in (1, 2, 3)] == [2, 2, 1]
    assert many.pick(8) == replace(many.pick(1), split_k_1=1), "one row for each expert, as with two tokens of 32"
    assert plans_for(replace(two_ranks, top_k=8)).pick(2).split_k_1 == 1


def test_any_shape_gets_plans_that_can_be_picked_and_hold_its_slots(subtests: pytest.Subtests) -> None:
    sizes = [(1, 1, 64, 64), (8192, 8, 7168, 2048), (4, 4, 64, 0), (2048, 2000, 96, 360), (32, 4, 2880, 360)]
    for size, format_name, arch in itertools.product(sizes, FORMATS, ("sm90", "sm120")):
        with subtests.test(size=size, format_name=format_name, arch=arch):
            names = ("num_experts", "top_k", "hidden_size", "intermediate_size")
            shape = LayerShape(arch=arch, format_name=format_name, **dict(zip(names, size, strict=True)))
            table = plans_for(shape)
            bounds = [bound for bound, _ in table.steps[:-1]]
            assert bounds == sorted(set(bounds)), "a step below another would be compiled and checked in vain"
            assert all(bound > 0 for bound in bounds)
            assert all(not plan.is_direct or bound * shape.top_k <= MAX_DIRECT_SLOTS for bound, plan in table.steps)


def test_every_plan_of_the_table_is_a_probe_of_its_own() -> None:
    is_direct = Plan(is_direct=True, block_m=8, block_n_1=64, block_n_2=64)
    grouped = Plan(is_direct=False, block_m=32, block_n_1=128, block_n_2=64)
    fp8 = replace(grouped, fp8_activations=True)
    steps = (
        (4, is_direct),
        (8, replace(is_direct, split_k=2)),
        (16, is_direct),
        (100, grouped),
        (1023, grouped),
        (None, fp8),
    )
    w13, w2 = (Bf16Weight(part.bfloat16()) for part in hostile.dense_experts(8, 64, 64))
    info = TritonBackend().prepare(ExpertWeights(w13=w13, w2=w2), CONFIG, Topology())
    info = replace(info, plans=PlanTable(steps))
    standard = TritonBackend().check_cases(info, "fp8_block", CONFIG, DispatchFormat.STANDARD)
    assert [probe.max_tokens for probe in standard] == [4, 8, 16, 1023, None], "equal plans are checked once"
    for probe, (_, plan) in zip(standard, steps[:3] + steps[4:], strict=True):
        assert probe.quant_info.plans.pick(probe.max_tokens or 5000) == plan
        assert probe.quant_info.layer is info.layer
        assert probe.quantize_input is (activation_quant.fp8_groups if plan is fp8 else None)
        assert probe.tolerance == (0.08 if plan is fp8 else 0.015)
    assert len({probe.name for probe in standard}) == len(standard)
    masked = TritonBackend().check_cases(info, "fp8_block", CONFIG, DispatchFormat.DEEPEP_LL)
    assert masked == standard[3:], "masked rows take grouped plans"


def test_few_tokens_of_a_direct_plan_are_a_probe_of_their_own_if_it_takes_more() -> None:
    is_direct = Plan(is_direct=True, block_m=8, block_n_1=64, block_n_2=64)
    grouped = Plan(is_direct=False, block_m=32, block_n_1=128, block_n_2=64)
    w13, w2 = (Bf16Weight(part.bfloat16()) for part in hostile.dense_experts(8, 64, 64))
    info = TritonBackend().prepare(ExpertWeights(w13=w13, w2=w2), CONFIG, Topology())
    wide = replace(is_direct, block_n_1=128)
    for steps, want in (
        (((64, is_direct), (None, grouped)), [(8, is_direct), (64, is_direct), (None, grouped)]),
        (((6, wide), (64, is_direct), (None, grouped)), [(6, wide), (8, is_direct), (64, is_direct), (None, grouped)]),
        (((8, wide), (64, is_direct), (None, grouped)), [(8, wide), (64, is_direct), (None, grouped)]),
    ):
        probes = TritonBackend().check_cases(
            replace(info, plans=PlanTable(steps)), "bf16", CONFIG, DispatchFormat.STANDARD
        )
        assert [(probe.max_tokens, probe.quant_info.plans.pick(probe.max_tokens or 999)) for probe in probes] == want
        assert probes[-2].rows_at_one_expert == (16, 3), "two whole tiles, and one that is not half full"


def test_plans_that_contradict_themselves_are_refused() -> None:
    plan = Plan(is_direct=True, block_m=8, block_n_1=64, block_n_2=64)
    with pytest.raises(MoeConfigError, match="the one without a bound"):
        PlanTable(((None, plan),))
    with pytest.raises(MoeConfigError, match="needs bounds"):
        PlanTable(((9, plan),))
    with pytest.raises(MoeConfigError, match="block_n_1 is 48"):
        replace(plan, block_n_1=48)
    for fields in ({"split_k": 2}, {"split_k_1": 2}, {"by_expert": True}):
        with pytest.raises(MoeConfigError, match="belong to direct plans"):
            replace(plan, is_direct=False, **fields)
    with pytest.raises(MoeConfigError, match="split_k_1 is 0: it must be at least 1"):
        replace(plan, split_k_1=0)
    for block_m, num_tile_heights in ((8, 2), (16, 3), (64, 4), (64, 0)):
        with pytest.raises(MoeConfigError, match=f"plan num_tile_heights is {num_tile_heights}"):
            replace(plan, is_direct=False, block_m=block_m, num_tile_heights=num_tile_heights)
    assert [
        replace(plan, is_direct=False, block_m=32, num_tile_heights=num_tile_heights).num_tile_heights
        for num_tile_heights in (1, 2, 3)
    ] == [1, 2, 3]
    with pytest.raises(MoeConfigError, match="heights is 2: tiles of several heights belong to grouped plans"):
        replace(plan, block_m=16, num_tile_heights=2)
