"""Sorts slots by expert before the grouped GEMMs, and sums a token's slots after them. Both are deterministic."""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["num_slots", "num_tiles", "first_expert", "num_experts"])
def group_slots(
    ids_ptr, slots_ptr, tiles_ptr, num_slots, num_tiles, first_expert, num_experts,
    BLOCK_M: tl.constexpr, EXPERTS_PAD: tl.constexpr, CHUNK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program per local expert. Writes its slots, ascending, into its run of `slots`, and its tiles.

    `tiles` [num_tiles, 3]: expert, first position, end position of its run; the last program marks unused tiles with
    expert -1. EXPERTS_PAD is a power of two above num_experts; ids outside the local range count nowhere.
    """
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_PAD)
    counts = tl.zeros((EXPERTS_PAD,), dtype=tl.int32)
    for begin in range(0, num_slots, CHUNK):
        slot = begin + tl.arange(0, CHUNK)
        local = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1) - first_expert
        is_local = (slot < num_slots) & (local >= 0) & (local < num_experts)
        counts += tl.histogram(tl.where(is_local, local, num_experts), EXPERTS_PAD)
    counts = tl.where(experts < num_experts, counts, 0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    start = tl.sum(tl.where(experts < expert, counts, 0))
    end = start + tl.sum(tl.where(experts == expert, counts, 0))
    first_tile = tl.sum(tl.where(experts < expert, tiles, 0))
    num_own = tl.sum(tl.where(experts == expert, tiles, 0))
    for begin in range(0, num_own, 32):
        tile = begin + tl.arange(0, 32)
        is_own = tile < num_own
        entry = tiles_ptr + (first_tile + tile) * 3
        tl.store(entry, expert, mask=is_own)
        tl.store(entry + 1, start + tile * BLOCK_M, mask=is_own)
        tl.store(entry + 2, end, mask=is_own)
    if expert == num_experts - 1:
        for begin in range(first_tile + num_own, num_tiles, 32):
            tile = begin + tl.arange(0, 32)
            tl.store(tiles_ptr + tile * 3, -1, mask=tile < num_tiles)
            tl.store(tiles_ptr + tile * 3 + 1, 0, mask=tile < num_tiles)
            tl.store(tiles_ptr + tile * 3 + 2, 0, mask=tile < num_tiles)
    position = start
    for begin in range(0, num_slots, CHUNK):
        slot = begin + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1)
        is_mine = ((ids - first_expert == expert) & (slot < num_slots)).to(tl.int32)
        rank = tl.cumsum(is_mine, axis=0) - 1
        tl.store(slots_ptr + position + rank, slot, mask=is_mine == 1)
        position += tl.sum(is_mine)


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def unpermute_sum(
    parts_ptr, ids_ptr, out_ptr, first_expert, num_experts, hidden_size,
    TOPK: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_H: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """out[token] = sum over its local slots and their splits of parts[slot, split], in this order, in fp32.

    Grid: (tokens, blocks of BLOCK_H columns).
    """
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    col_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total_H = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for choice in tl.static_range(TOPK):
        slot = token * TOPK + choice
        local = tl.load(ids_ptr + slot) - first_expert
        num_cols = tl.where((local >= 0) & (local < num_experts), hidden_size, 0)  # none of a skipped slot's row
        for split in tl.static_range(SPLIT_K):
            part_ptrs = parts_ptr + (slot * SPLIT_K + split) * hidden_size + col_H
            total_H += tl.load(part_ptrs, mask=col_H < num_cols, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden_size + col_H, total_H.to(out_ptr.dtype.element_ty), mask=col_H < hidden_size)
