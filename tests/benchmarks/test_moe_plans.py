"""The plans that a search tries: they can serve their tokens, differ from each other, and are not too many."""

import dataclasses
from typing import Any

from benchmarks.moe_cases import CASES
from benchmarks.moe_plans import candidates
from moe.backends.triton.plans import TABLE
from moe.kernels.plan import MAX_DIRECT_SLOTS, Plan
from moe.tables import read_entries
from tests.tables import rows

FORMATS = ["mxfp4", "bf16", "fp8_block", "nvfp4"]
TOKENS = [1, 2, 3, 4, 7, 8, 12, 16, 24, 31, 32, 33, 48, 64, 100, 128, 200, 256, 512, 700, 1024, 2048, 4096, 16384]


@rows("model, case", *CASES.items())
@rows("format_name", *FORMATS)
@rows("tokens", *TOKENS)
def test_every_case_has_some_distinct_plans_that_can_serve_it(
    model: Any, case: Any, format_name: Any, tokens: Any
) -> None:
    plans = candidates(case, tokens, format_name)
    assert len(plans) >= 5
    num_whole = sum(plan.split_k_1 == 1 for plan in plans)
    assert num_whole <= 22
    assert len(plans) <= num_whole * len({plan.split_k_1 for plan in plans})
    assert len(set(plans)) == len(plans)
    assert all(not plan.is_direct or tokens * case.top_k <= MAX_DIRECT_SLOTS for plan in plans)
    assert all(plan.pdl for plan in plans)
    assert all(plan.fp8_activations == (format_name == "fp8_block" and plan.block_m == 128) for plan in plans)
    assert any(plan.is_direct for plan in plans) or tokens >= 32
    if tokens >= 1024:
        assert not any(plan.is_direct for plan in plans), "the last step of a table cannot be direct"


def values(field: str, model: str, tokens: int, format_name: str = "mxfp4", **fields: Any) -> set[Any]:
    """What a field is among the plans whose other fields are these."""
    plans = [dataclasses.asdict(plan) for plan in candidates(CASES[model], tokens, format_name)]
    return {plan[field] for plan in plans if fields.items() <= plan.items()}


@rows("format_name", *FORMATS)
def test_from_32_tokens_on_both_kinds_are_compared_while_slots_are_few(format_name: str) -> None:
    kinds = [values("is_direct", "gpt-oss-20b", tokens, format_name) for tokens in (31, 32, 64)]
    assert kinds == [{True}, {True, False}, {True, False}]


def test_both_ways_of_counting_programs_are_compared_where_experts_have_about_a_row() -> None:
    ways = [values("by_expert", "gpt-oss-20b", tokens) for tokens in (1, 4, 8, 16)]
    assert ways == [{False}, {False, True}, {False, True}, {True}]


@rows(
    "model, tokens, columns, splits",
    ("gpt-oss-20b", 1, 64, {2, 3}), ("gpt-oss-20b", 4, 64, {1, 2}), ("deepseek-v3-quarter", 4, 64, {1}),
    ("gpt-oss-20b", 1, 128, {1}),
)  # fmt: skip
def test_few_programs_are_split(model: str, tokens: int, columns: int, splits: set[int]) -> None:
    assert values("split_k", model, tokens, "nvfp4", block_n_2=columns) == splits


@rows(
    "model, tokens, format_name, columns, splits",
    ("gpt-oss-20b-tp2", 1, "mxfp4", 64, {1, 2, 4}),  # 4 * 45 programs
    ("gpt-oss-20b-tp2", 4, "mxfp4", 64, {1}),
    ("deepseek-v3-quarter-tp2", 1, "fp8_block", 64, {1, 2, 4}),
    ("deepseek-v3-quarter-tp2", 4, "fp8_block", 64, {1}),
    ("deepseek-v3-quarter-tp2", 2, "nvfp4", 64, {1, 2, 4}),  # 16 * 32 programs
    ("deepseek-v3-quarter", 2, "nvfp4", 64, {1}),
    ("deepseek-v3-quarter", 2, "nvfp4", 128, {1, 2, 4}),
    ("tiny-gpt-oss", 1, "mxfp4", 64, {1, 2}),  # two steps and a tail
    ("tiny-gpt-oss", 1, "bf16", 64, {1, 2, 4}),
)
def test_the_first_matrix_is_split_where_it_has_few_programs_into_no_more_parts_than_steps(
    model: str, tokens: int, format_name: str, columns: int, splits: set[int]
) -> None:
    assert values("split_k_1", model, tokens, format_name, is_direct=True, block_n_1=columns) == splits


def test_tiles_are_about_as_high_as_runs_and_lower_for_a_small_layer() -> None:
    counts = (64, 128, 256, 512, 1024, 4096)
    heights = [values("block_m", "gpt-oss-20b", tokens, is_direct=False) for tokens in counts]
    assert heights == [{16}, {16, 32}, {32, 64}, {64, 128}, {128}, {128}]
    assert values("block_m", "tiny-gpt-oss", 1024, is_direct=False) == {64, 128}
    assert values("num_tile_heights", "tiny-gpt-oss", 256, block_m=32) == {1}


def test_a_layer_of_one_expert_has_plans_too() -> None:
    case = dataclasses.replace(CASES["gpt-oss-20b"], num_experts=1, top_k=1, num_active={})
    assert all(candidates(case, tokens, "mxfp4") for tokens in range(1, 200))


FASTEST: list[tuple[str, str, int, dict[str, Any]]] = [
    ("gpt-oss-20b", "mxfp4", 1, {"block_m": 8, "num_stages_1": 6, "split_k": 2}),
    ("gpt-oss-20b", "mxfp4", 16, {"block_m": 16, "by_expert": True}),  # with popular experts
    (
        "gpt-oss-120b", "mxfp4", 256,
        {"block_m": 16, "block_n_2": 128, "num_warps_1": 2, "num_stages_2": 3, "tile_group": 1},
    ),
    (
        "deepseek-v3-quarter", "fp8_block", 64,
        {"block_m": 16, "block_n_1": 256, "block_n_2": 128, "num_warps_1": 8, "num_stages_2": 3, "tile_group": 2},
    ),
    ("tiny-gpt-oss", "mxfp4", 256, {"block_m": 32}),
]  # fmt: skip


def test_plans_that_were_fastest_on_an_h100_are_tried_again() -> None:
    for model, format_name, tokens, fields in FASTEST:
        plan = Plan(**{"is_direct": tokens < 64, "block_n_1": 64, "block_n_2": 64, "pdl": True} | fields)
        assert plan in candidates(CASES[model], tokens, format_name), (model, format_name, tokens)


def test_a_new_search_tries_every_plan_that_is_shipped() -> None:
    for entry in read_entries(TABLE):
        shape = entry["shape"]
        (case,) = [case for case in CASES.values() if all(getattr(case, name) == shape[name] for name in shape)]
        for step in entry["steps"]:
            assert Plan(**step["plan"]) in candidates(case, step["measured_at"], entry["format"]), (shape, step)
