"""The backend's refusals and its choice of launch plans; needs no GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, MoeConfigError, MoeRunner, UnsupportedPathError
from moe.backends.triton import plans as triton_plans
from moe.backends.triton.backend import TritonBackend, TritonMoeQuantInfo
from moe.backends.triton.plans import LayerShape, PlanTable, plans_for
from moe.config import DispatchFormat
from moe.device import Device
from moe.formats import activation_quant
from moe.kernels.plan import MAX_DIRECT_SLOTS, Plan
from moe.tables import read_entries
from moe.topology import Topology
from tests.moe.backends import hostile
from tests.moe.configs import rank_config
from tests.tables import rows

CONFIG = rank_config(num_experts=8, hidden_size=64, intermediate_size=64, top_k=2)
SHAPE = LayerShape(
    arch="sm70", format_name="mxfp4", num_experts=32, top_k=4, hidden_size=2880, intermediate_size=2880
)  # fmt: skip
DIRECT = Plan(is_direct=True, block_m=8, block_n_1=64, block_n_2=64)
GROUPED = Plan(is_direct=False, block_m=32, block_n_1=128, block_n_2=64)


@rows(
    "arch, format_name, a2a, reason",
    ("sm90", "mxfp4", MoeA2ABackend.NONE, None),
    ("sm80", "nvfp4", MoeA2ABackend.NONE, None),
    ("cpu", "mxfp4", MoeA2ABackend.NONE, "device cpu"),
    ("sm75", "mxfp4", MoeA2ABackend.NONE, "no bf16 tensor cores"),
    ("sm90", "fp8_tensor", MoeA2ABackend.NONE, "format fp8_tensor"),
    ("sm90", "mxfp4", MoeA2ABackend.MORI, "transport mori"),
)
def test_supports_answers_with_none_or_a_reason(arch: str, format_name: str, a2a: Any, reason: str | None) -> None:
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


@rows("num_experts, top_k", (32, 4), (256, 8), (4, 2), (1, 1))
def test_the_rule_has_direct_plans_for_up_to_16_tokens(num_experts: int, top_k: int) -> None:
    table = plans_for(replace(SHAPE, num_experts=num_experts, top_k=top_k))
    assert all(table.pick(num_tokens).is_direct for num_tokens in (1, 8, 9, 16))
    assert not any(table.pick(num_tokens).is_direct for num_tokens in (17, 64, 500, 100_000))


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


@rows("sizes", (1, 1, 64, 64), (8192, 8, 7168, 2048), (4, 4, 64, 0), (2048, 2000, 96, 360), (32, 4, 2880, 360))
@rows("format_name", "bf16", "fp8_block", "mxfp4", "nvfp4")
@rows("arch", "sm90", "sm120")
def test_any_shape_gets_plans_that_can_be_picked_and_hold_its_slots(
    sizes: tuple[int, ...], format_name: str, arch: str
) -> None:
    names = ("num_experts", "top_k", "hidden_size", "intermediate_size")
    shape = LayerShape(arch=arch, format_name=format_name, **dict(zip(names, sizes, strict=True)))
    *steps, _ = plans_for(shape).steps
    bounds = [bound for bound, _ in steps]
    assert bounds == sorted(set(bounds)), "a step below another would be compiled and checked in vain"
    assert all(bound > 0 for bound in bounds)
    assert all(not plan.is_direct or bound * shape.top_k <= MAX_DIRECT_SLOTS for bound, plan in steps)


@pytest.fixture
def info() -> TritonMoeQuantInfo:
    return TritonBackend().prepare(hostile.plain_experts("bf16", 8, 64, 64), CONFIG, Topology())


def test_every_plan_of_the_table_is_a_probe_of_its_own(info: TritonMoeQuantInfo) -> None:
    fp8 = replace(GROUPED, fp8_activations=True)
    steps = (
        (4, DIRECT), (8, replace(DIRECT, split_k=2)), (16, DIRECT), (100, GROUPED), (1023, GROUPED), (None, fp8),
    )  # fmt: skip
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


@rows("before, want", ([], [8, 64]), ([6], [6, 8, 64]), ([8], [8, 64]))
def test_few_tokens_of_a_direct_plan_are_a_probe_of_their_own_if_it_takes_more(
    info: TritonMoeQuantInfo, before: list[int], want: list[int]
) -> None:
    wide = [(bound, replace(DIRECT, block_n_1=128)) for bound in before]
    info = replace(info, plans=PlanTable((*wide, (64, DIRECT), (None, GROUPED))))
    probes = TritonBackend().check_cases(info, "bf16", CONFIG, DispatchFormat.STANDARD)
    got = [(probe.max_tokens, probe.quant_info.plans.pick(probe.max_tokens or 999)) for probe in probes]
    own = [(bound, DIRECT) for bound in want[len(before) :]]
    assert got == [*wide, *own, (None, GROUPED)]
    assert probes[-2].rows_at_one_expert == (16, 3), "two whole tiles, and one that is not half full"


@rows(
    "fields, words",
    ({"block_n_1": 48}, "block_n_1 is 48"),
    ({"split_k_1": 0}, "split_k_1 is 0: it must be at least 1"),
    ({"block_m": 16, "num_tile_heights": 2}, "heights is 2: tiles of several heights belong to grouped plans"),
    *(({"is_direct": False, field: 2}, "belong to direct plans") for field in ("split_k", "split_k_1", "by_expert")),
    *(
        ({"is_direct": False, "block_m": block_m, "num_tile_heights": number}, f"plan num_tile_heights is {number}")
        for block_m, number in ((8, 2), (16, 3), (64, 4), (64, 0))
    ),
)
def test_plans_that_contradict_themselves_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(MoeConfigError, match=words):
        replace(DIRECT, **fields)


def test_tables_need_a_grouped_plan_without_a_bound_and_plans_may_have_three_heights() -> None:
    with pytest.raises(MoeConfigError, match="the one without a bound"):
        PlanTable(((None, DIRECT),))
    with pytest.raises(MoeConfigError, match="needs bounds"):
        PlanTable(((9, GROUPED),))
    for num_tile_heights in (1, 2, 3):
        assert replace(GROUPED, num_tile_heights=num_tile_heights).num_tile_heights == num_tile_heights
