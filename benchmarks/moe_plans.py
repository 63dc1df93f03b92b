"""Launch plans that are worth trying for a layer, a number format and a number of tokens. Measures nothing.

The lists are what searches on an H100 left over. "Rows" are the mean rows of an expert: tokens * top-k / experts.
A tile is (rows of weights, warps, stages) of one matrix.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from benchmarks.moe_cases import LayerCase
from moe.kernels.layout import STEP
from moe.kernels.plan import Plan

Tile = tuple[int, int, int]
Pair = tuple[Tile, Tile]  # of the first and of the second matrix

NUM_SMS = 132  # of an H100
MANY_PROGRAMS = 4 * NUM_SMS  # of the first matrix: they need no parts of its reduction axis to keep the memory busy
DIRECT_SLOTS = 256  # beyond, sorting them pays
DIRECT_ROWS = 16
SORTED_TOKENS = 32  # from here on sorting may pay
LOWEST, TALLEST = 16, 128  # tiles of grouped plans

_MIDDLE: Tile = (64, 4, 4)
_NARROW: tuple[Tile, ...] = ((64, 4, 3), (64, 4, 4), (64, 4, 6))
_DEEP: tuple[Tile, ...] = ((64, 2, 3), (64, 4, 4), (64, 4, 6))
_NVFP4 = (((64, 4, 4), (64, 4, 6), (128, 4, 4), (128, 4, 6)), ((64, 4, 4), (64, 4, 6), (128, 4, 4)))

# Tiles of the first matrix and of the second; every two are combined.
_BY_SLOT: dict[str, tuple[tuple[Tile, ...], tuple[Tile, ...]]] = {
    "mxfp4": (_NARROW, ((64, 4, 3), (64, 4, 4), (64, 2, 3))),
    "bf16": (_NARROW, _DEEP),
    "fp8_block": (_NARROW, _DEEP),
    "nvfp4": _NVFP4,
}
_BY_EXPERT = _BY_SLOT | {
    "mxfp4": (((64, 4, 3), (64, 4, 4), (128, 4, 4)), ((64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 4, 4))),
}

# Tiles that go together, by rows of activations.
_SAME_3: Pair = ((128, 4, 3), (128, 4, 3))
_SAME_4: Pair = ((128, 4, 4), (128, 4, 4))
_WIDE: Pair = ((256, 8, 4), (256, 8, 4))
_FP8: dict[int, list[Pair]] = {
    16: [((256, 8, 4), (128, 4, 3)), ((128, 4, 4), (128, 4, 3)), ((128, 4, 3), (128, 4, 4))],
    32: [_SAME_3],
    64: [_SAME_3, ((128, 4, 4), (128, 4, 3))],
    128: [_SAME_3, _SAME_4],
}
_GROUPED: dict[str, dict[int, list[Pair]]] = {
    "mxfp4": {
        16: [((64, 4, 4), (128, 4, 3)), ((64, 2, 4), (128, 4, 3)), ((64, 4, 4), (64, 4, 4)), _SAME_3],
        32: [_SAME_4],
        64: [((128, 8, 4), (256, 8, 4)), ((128, 4, 3), (256, 8, 4)), _SAME_3],
        128: [_SAME_3, _SAME_4, ((128, 4, 4), (128, 4, 3))],
    },
    "bf16": _FP8,  # as many bytes in flight as FP8 with half the columns in a step
    "fp8_block": _FP8,
    "nvfp4": {
        16: [_SAME_4, ((128, 4, 6), (128, 4, 6)), ((64, 4, 6), (128, 4, 4)), ((256, 8, 4), (128, 4, 4))],
        32: [_SAME_4],
        64: [_SAME_3, _SAME_4, _WIDE],
        128: [_SAME_3, _SAME_4, _WIDE],
    },
}
# Sizes of tiles: `block_m` and below, for the ends of runs.
_HEIGHTS = {16: 1, 32: 2, 64: 2, 128: 3}


def candidates(case: LayerCase, num_tokens: int, format_name: str) -> list[Plan]:
    """Distinct plans, all of which can serve so many tokens; above DIRECT_SLOTS slots all of them are grouped."""
    plans = [*_direct_plans(case, num_tokens, format_name), *_grouped_plans(case, num_tokens, format_name)]
    return list(dict.fromkeys(plans))


def _may_be_direct(case: LayerCase, num_tokens: int) -> bool:
    num_slots = num_tokens * case.top_k
    return num_slots <= min(DIRECT_SLOTS, DIRECT_ROWS * case.num_experts)


def _direct_plans(case: LayerCase, num_tokens: int, format_name: str) -> Iterator[Plan]:
    for plan in _plans_with_whole_tiles(case, num_tokens, format_name):
        for split_k_1 in _first_splits(case, num_tokens, format_name, plan.block_n_1):
            yield replace(plan, split_k_1=split_k_1)


def _first_splits(case: LayerCase, num_tokens: int, format_name: str, block_n: int) -> tuple[int, ...]:
    """Parts of the first matrix's reduction axis: several only for few programs, and no more than there are steps."""
    num_programs = case.active(num_tokens) * -(-2 * case.intermediate_size // block_n)
    num_steps = case.hidden_size // STEP[format_name] if num_programs < MANY_PROGRAMS else 1
    return (1, *(parts for parts in (2, 4) if parts <= num_steps))


def _plans_with_whole_tiles(case: LayerCase, num_tokens: int, format_name: str) -> Iterator[Plan]:
    if not _may_be_direct(case, num_tokens):
        return
    rows = num_tokens * case.top_k / case.num_experts
    splits = _splits(case, num_tokens)
    by_expert = rows >= 1
    if num_tokens < SORTED_TOKENS:
        for one, two in product(*(_BY_EXPERT if by_expert else _BY_SLOT)[format_name]):
            for split_k in splits if two[0] == 64 else (1,):
                yield _direct(8, by_expert, one, two, split_k)
    for split_k in splits:  # the next best ways, with the tile that is never far from the best
        if rows <= 8:
            yield _direct(8, by_expert, _MIDDLE, _MIDDLE, split_k)
        if 0.5 <= rows <= 1:
            yield _direct(8, not by_expert, _MIDDLE, _MIDDLE, split_k)
        if rows >= 2:
            yield _direct(16, by_expert, _MIDDLE, _MIDDLE, split_k)


def _splits(case: LayerCase, num_tokens: int) -> tuple[int, ...]:
    """Parts of the second matrix's reduction axis: the fewer programs there are, the more."""
    num_programs = case.active(num_tokens) * case.hidden_size / 64
    if num_programs < 3 * NUM_SMS:
        return (2, 3)
    return (1, 2) if num_programs < 18 * NUM_SMS else (1,)


def _direct(block_m: int, by_expert: bool, one: Tile, two: Tile, split_k: int) -> Plan:
    return Plan(
        is_direct=True, block_m=block_m, by_expert=by_expert, split_k=split_k, pdl=True,
        block_n_1=one[0], num_warps_1=one[1], num_stages_1=one[2],
        block_n_2=two[0], num_warps_2=two[1], num_stages_2=two[2],
    )  # fmt: skip


def _grouped_plans(case: LayerCase, num_tokens: int, format_name: str) -> Iterator[Plan]:
    if num_tokens < SORTED_TOKENS and _may_be_direct(case, num_tokens):
        return
    rows = num_tokens * case.top_k / case.num_experts
    num_programs = case.num_experts * max(1.0, rows / TALLEST) * case.intermediate_size / 64
    is_small = num_programs < NUM_SMS  # lower and narrower tiles give such a layer more programs
    rows = min(rows, TALLEST) / (2 if is_small else 1)
    for block_m, pairs in _GROUPED[format_name].items():
        if 2 * rows <= 3 * block_m and (block_m == LOWEST or 3 * block_m < 8 * rows):
            more = [(_MIDDLE, _MIDDLE)] if is_small else []
            num_tile_heights = 1 if is_small and block_m == 32 else _HEIGHTS[block_m]
            for (one, two), tile_group in product(pairs + more, _tile_groups(block_m, is_small)):
                yield Plan(
                    is_direct=False, block_m=block_m, num_tile_heights=num_tile_heights, tile_group=tile_group,
                    pdl=True,
                    fp8_activations=format_name == "fp8_block" and block_m == TALLEST,
                    block_n_1=one[0], num_warps_1=one[1], num_stages_1=one[2],
                    block_n_2=two[0], num_warps_2=two[1], num_stages_2=two[2],
                )  # fmt: skip


def _tile_groups(block_m: int, is_small: bool) -> tuple[int, ...]:
    """These need no compilation of their own."""
    if is_small:
        return (1, 4)
    return (1, 4, 8) if block_m == TALLEST else (1, 2, 4)
