"""The grouped GEMM of both expert matrices. Weights are the left operand, so the few token rows of a tile are its
narrow side. Here are the tiles and their epilogue; `plan.py` has the launch parameters.

Shape letters: N weight rows of a tile, M token rows of a tile, S slots.
A slot is one (token, choice) pair, numbered token * TOPK + choice.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe.kernels.arrivals import is_last_to_arrive, sum_parts
from moe.kernels.products import FP8_BLOCK, FP8_BOTH, block_words, multiply, multiply_fp8

# One thread asks the L2 for a contiguous range; nothing waits for it.
_PREFETCH_ASM = tl.constexpr("""
{
.reg .pred p;
.reg .b32 t;
mov.u32 t, %tid.x;
setp.eq.u32 p, t, 0;
@p cp.async.bulk.prefetch.L2.global [$1], $2;
mov.b32 $0, 0;
}
""")


@triton.jit
def _prefetch(ptr, num_bytes):
    tl.inline_asm_elementwise(
        _PREFETCH_ASM, "=r,l,r", [ptr.to(tl.int64), num_bytes], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_weights(
    w_ptr, expert, block, split, num_splits, num_blocks, num_steps,
    BLOCK_N: tl.constexpr, BLOCK_WORDS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Prefetch the first weights of the loop of a tile, one of `num_splits` along K, into the L2."""
    begin = num_steps * split // num_splits
    num_first = tl.minimum(num_steps * (split + 1) // num_splits - begin, NUM_STAGES)
    for part in tl.static_range(BLOCK_N // 64):
        first = block * (BLOCK_N // 64) + part
        if first < num_blocks:
            index = (expert.to(tl.int64) * num_steps + begin) * num_blocks + first
            for step in tl.static_range(NUM_STAGES):
                if step < num_first:
                    _prefetch(w_ptr + (index + step * num_blocks) * BLOCK_WORDS, 2 * BLOCK_WORDS)


@triton.jit
def _token_slots(
    ids_ptr, candidate, num_tokens, first_expert, num_experts,
    TOPK: tl.constexpr, CHOICES_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BY_EXPERT: tl.constexpr,
):  # fmt: skip
    """`_expert_slots` for at most BLOCK_M tokens, with lower latency: every token has its own row.

    Returns (local expert, slot of every row or -1, 0 if there is nothing to do).
    """
    choice_C = tl.arange(0, CHOICES_PAD)
    row_M = tl.arange(0, BLOCK_M)
    slot_MC = row_M[:, None] * TOPK + choice_C[None, :]
    is_slot_MC = (row_M < num_tokens)[:, None] & (choice_C < TOPK)[None, :]
    ids_MC = tl.load(ids_ptr + slot_MC, mask=is_slot_MC, other=-1)
    expert = candidate
    if not BY_EXPERT:
        expert = tl.load(ids_ptr + candidate) - first_expert
    is_mine_MC = (ids_MC == expert + first_expert) & is_slot_MC
    first = tl.min(tl.where(is_mine_MC, slot_MC, BLOCK_M * TOPK))
    is_mine = (first < BLOCK_M * TOPK) if BY_EXPERT else (first == candidate)
    count = tl.where(is_mine & (expert >= 0) & (expert < num_experts), 1, 0)
    return expert, tl.max(tl.where(is_mine_MC, slot_MC, -1), axis=1), count


@triton.jit
def _expert_slots(
    ids_ptr, candidate, num_slots, first_expert, num_experts, SLOTS_PAD: tl.constexpr, BY_EXPERT: tl.constexpr
):
    """The slots of a candidate: a local expert, or a slot that stands for its expert if it is the expert's first.

    Returns (local expert, rank of every slot among those of the expert or -1, their number).
    """
    slot_S = tl.arange(0, SLOTS_PAD)
    ids_S = tl.load(ids_ptr + slot_S, mask=slot_S < num_slots, other=-1)
    expert = candidate
    if not BY_EXPERT:
        expert = tl.load(ids_ptr + candidate) - first_expert
    is_mine_S = (ids_S == expert + first_expert) & (slot_S < num_slots)
    count = tl.sum(is_mine_S.to(tl.int32))
    if not BY_EXPERT:
        count = tl.where(tl.min(tl.where(is_mine_S, slot_S, SLOTS_PAD)) == candidate, count, 0)
    count = tl.where((expert >= 0) & (expert < num_experts), count, 0)
    rank_S = tl.cumsum(is_mine_S.to(tl.int32), axis=0) - 1
    return expert, tl.where(is_mine_S, rank_S, -1), count


@triton.jit
def activate(gate, up, alpha, beta, limit, HAS_LIMIT: tl.constexpr):
    """The gated activation of `moe.config.Activation`; plain SwiGLU for (1, 0, anything) without a limit."""
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate * (1.0 / (1.0 + tl.exp(-alpha * gate))) * (up + beta)


@triton.jit
def _store(
    acc, post_ptr, bias_ptr, out_ptr, weights_ptr, expert, is_row_M, row_M, first_row, split, num_out, out_stride,
    num_blocks, alpha, beta, limit,
    IS_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
):  # fmt: skip
    """Epilogue: store the result of the sums [ROWS, BLOCK_M] of the weight rows from `first_row` on.

    Rows of `out` have `num_out` columns and begin `out_stride` numbers apart.
    """
    row_N = first_row + tl.arange(0, ROWS)
    half_N = row_N // 8 % 2 if IS_FIRST else row_N * 0
    acc *= tl.load(post_ptr + expert * 2 + half_N)[:, None]
    if HAS_BIAS:
        bias_N = tl.load(bias_ptr + expert * num_blocks * 64 + row_N, mask=row_N < num_blocks * 64, other=0.0)
        if SPLIT_K > 1 and not IS_FIRST:
            bias_N = tl.where(split == 0, bias_N, 0.0)
        acc += bias_N[:, None]
    if IS_FIRST:
        pairs = acc.reshape(ROWS // 16, 2, 8, BLOCK_M).permute(0, 2, 3, 1)
        gate, up = tl.split(pairs)
        result = activate(gate, up, alpha, beta, limit, HAS_LIMIT).reshape(ROWS // 2, BLOCK_M)
        out_N = first_row // 2 + tl.arange(0, ROWS // 2)
        out_ptrs = out_ptr + (row_M * out_stride)[None, :] + out_N[:, None]
    else:
        result = acc * tl.load(weights_ptr + row_M, mask=is_row_M, other=0.0)[None, :]
        out_N = row_N
        out_ptrs = out_ptr + ((row_M * SPLIT_K + split) * out_stride)[None, :] + out_N[:, None]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_row_M[None, :] & (out_N < num_out)[:, None])


@triton.jit
def _part_ptrs(parts_ptr, is_row_M, row_M, first_row, num_blocks, ROWS: tl.constexpr, SPLIT_K: tl.constexpr):
    """Pointers to the first parts of the sums [ROWS, BLOCK_M] from `first_row` on, and a mask: which sums there are.

    Parts of a sum are num_blocks * 64 numbers apart: a slot has one after the other, each with all of its rows.
    """
    row_N = first_row + tl.arange(0, ROWS)
    slot_ptr_M = parts_ptr + row_M.to(tl.int64) * (SPLIT_K * num_blocks * 64)
    return slot_ptr_M[None, :] + row_N[:, None], is_row_M[None, :] & (row_N < num_blocks * 64)[:, None]


@triton.jit
def _tile(
    x_ptr, xs_ptr, w_ptr, s_ptr, tail_ptr, post_ptr, bias_ptr, out_ptr, weights_ptr, parts_ptr, arrived_ptr,
    expert, slot_M, block, split, x_stride, xs_stride, num_cols, num_out, out_stride, num_blocks, num_steps,
    alpha, beta, limit,
    FORMAT: tl.constexpr, IS_FIRST: tl.constexpr, TOPK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STEP_K: tl.constexpr, WORDS: tl.constexpr, SPLIT_K: tl.constexpr, AT_ONCE: tl.constexpr, NUM_STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_LIMIT: tl.constexpr, SHORT_K: tl.constexpr, HAS_TAIL: tl.constexpr, WIDE: tl.constexpr,
    USE_ASM: tl.constexpr, USE_WGMMA: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One tile of `expert`, from its rows' slots (-1 for none) to the stored result.

    Of the programs that share a tile of the first matrix, the last to arrive at `arrived_ptr` stores it.
    """
    is_row_M = slot_M >= 0
    row_M = tl.where(is_row_M, slot_M, 0)
    source_M = row_M // TOPK if IS_FIRST else row_M
    if WIDE:  # 64-bit offsets where 32 bits are too few; they cost registers
        row_M, source_M = row_M.to(tl.int64), source_M.to(tl.int64)
    x_ptr_M = x_ptr + source_M * x_stride
    begin, end = num_steps * split // SPLIT_K, num_steps * (split + 1) // SPLIT_K
    first_row = block * BLOCK_N
    IS_FP8: tl.constexpr = (FORMAT == FP8_BLOCK) | (FORMAT == FP8_BOTH)
    PARTS: tl.constexpr = 2 if IS_FP8 and BLOCK_N >= 128 else 1
    ROWS: tl.constexpr = BLOCK_N // PARTS
    if IS_FP8:
        acc, acc_1 = multiply_fp8(
            x_ptr_M, xs_ptr + source_M, xs_stride, is_row_M, w_ptr, s_ptr, expert, first_row, begin, end, num_blocks,
            num_steps, num_cols,
            FORMAT, BLOCK_M, ROWS, PARTS, STEP_K, WORDS, NUM_STAGES, SHORT_K, USE_ASM, INTERPRET,
        )  # fmt: skip
    else:
        acc = multiply(
            x_ptr_M, is_row_M, w_ptr, s_ptr, tail_ptr, expert, first_row, begin, end, num_blocks, num_steps, num_cols,
            FORMAT, BLOCK_M, BLOCK_N, STEP_K, WORDS, NUM_STAGES, SHORT_K, HAS_TAIL, USE_ASM, USE_WGMMA, INTERPRET,
        )  # fmt: skip
    is_done = True
    if IS_FIRST and SPLIT_K > 1:
        stride = num_blocks * 64
        part_ptrs, is_sum = _part_ptrs(parts_ptr, is_row_M, row_M, first_row, num_blocks, ROWS, SPLIT_K)
        tl.store(part_ptrs + split * stride, acc, mask=is_sum)
        if PARTS == 2:
            part_1_ptrs, is_sum_1 = _part_ptrs(parts_ptr, is_row_M, row_M, first_row + ROWS, num_blocks, ROWS, SPLIT_K)
            tl.store(part_1_ptrs + split * stride, acc_1, mask=is_sum_1)
        is_done = is_last_to_arrive(arrived_ptr, SPLIT_K)
        if is_done:
            acc = sum_parts(part_ptrs, is_sum, SPLIT_K, stride, AT_ONCE)
            if PARTS == 2:
                acc_1 = sum_parts(part_1_ptrs, is_sum_1, SPLIT_K, stride, AT_ONCE)
    if is_done:
        if PARTS == 2:
            _store(
                acc_1, post_ptr, bias_ptr, out_ptr, weights_ptr, expert, is_row_M, row_M, first_row + ROWS, split,
                num_out, out_stride, num_blocks, alpha, beta, limit,
                IS_FIRST, ROWS, BLOCK_M, SPLIT_K, HAS_BIAS, HAS_LIMIT,
            )  # fmt: skip
        _store(
            acc, post_ptr, bias_ptr, out_ptr, weights_ptr, expert, is_row_M, row_M, first_row, split, num_out,
            out_stride, num_blocks, alpha, beta, limit, IS_FIRST, ROWS, BLOCK_M, SPLIT_K, HAS_BIAS, HAS_LIMIT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "first_expert", "num_experts"])
def direct_gemm(
    x_ptr, xs_ptr, w_ptr, s_ptr, tail_ptr, post_ptr, bias_ptr, out_ptr, ids_ptr, weights_ptr, parts_ptr, arrived_ptr,
    num_tokens, first_expert, num_experts, x_stride, xs_stride, num_cols, num_out, out_stride, num_blocks, num_steps,
    alpha, beta, limit,
    FORMAT: tl.constexpr, IS_FIRST: tl.constexpr, BY_EXPERT: tl.constexpr, TOPK: tl.constexpr,
    CHOICES_PAD: tl.constexpr, SLOTS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP_K: tl.constexpr, WORDS: tl.constexpr, SPLIT_K: tl.constexpr,
    AT_ONCE: tl.constexpr, NUM_STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LIMIT: tl.constexpr,
    SHORT_K: tl.constexpr, HAS_TAIL: tl.constexpr, WIDE: tl.constexpr, IS_PITCHED: tl.constexpr,
    USE_ASM: tl.constexpr, USE_WGMMA: tl.constexpr, USE_PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A layer's GEMM for few tokens: every program finds its expert's slots by itself, at most SLOTS_PAD in all.

    SLOTS_PAD 0: there are no more tokens than rows in a tile. CHOICES_PAD: a power of two, at least TOPK.

    First matrix (IS_FIRST): out[slot] = activation(W13 x[token] + b13), bf16, one row per slot. With SPLIT_K > 1 the
    programs of a tile store fp32 parts [slots, SPLIT_K, num_blocks * 64] and count to SPLIT_K in a number of `arrived`,
    which has one for each tile of the grid; with 1 both are None.
    Second: out[slot, split] = (W2 x[slot] + b2) * weight[slot], the bias in split 0.
    Rows of skipped slots stay as they are. Grid: (weight tiles, candidates, tiles of an expert * SPLIT_K); most experts
    have one tile, and programs without one start last, where they delay nothing.
    """
    if not IS_PITCHED:  # one number less to keep at hand
        out_stride = num_out
    block, split = tl.program_id(0), tl.program_id(2) % SPLIT_K
    begin = tl.program_id(2) // SPLIT_K * BLOCK_M
    if USE_PDL and IS_FIRST:  # what comes before may still be writing the ids; the second matrix finds them written
        gdc_wait()
    if SLOTS_PAD == 0:
        expert, slot_M, count = _token_slots(
            ids_ptr, tl.program_id(1), num_tokens, first_expert, num_experts, TOPK, CHOICES_PAD, BLOCK_M, BY_EXPERT
        )
    else:
        expert, rank_S, count = _expert_slots(
            ids_ptr, tl.program_id(1), num_tokens * TOPK, first_expert, num_experts, SLOTS_PAD, BY_EXPERT
        )
    if USE_PDL:
        if begin < count:
            prefetch_weights(
                w_ptr, expert, block, split, SPLIT_K, num_blocks, num_steps, BLOCK_N, block_words(FORMAT, WORDS),
                NUM_STAGES,
            )  # fmt: skip
        if not IS_FIRST:
            gdc_wait()
        gdc_launch_dependents()
    if begin < count:
        if SLOTS_PAD > 0:
            is_row_MS = rank_S[None, :] == begin + tl.arange(0, BLOCK_M)[:, None]
            slot_M = tl.max(tl.where(is_row_MS, tl.arange(0, SLOTS_PAD)[None, :], -1), axis=1)
        if IS_FIRST and SPLIT_K > 1:
            tile = tl.program_id(2) // SPLIT_K * tl.num_programs(1) + tl.program_id(1)
            arrived_ptr += tile * tl.num_programs(0) + block
        _tile(
            x_ptr, xs_ptr, w_ptr, s_ptr, tail_ptr, post_ptr, bias_ptr, out_ptr, weights_ptr, parts_ptr, arrived_ptr,
            expert, slot_M, block, split, x_stride, xs_stride, num_cols, num_out, out_stride, num_blocks, num_steps,
            alpha, beta, limit,
            FORMAT, IS_FIRST, TOPK, BLOCK_M, BLOCK_N, STEP_K, WORDS, SPLIT_K, AT_ONCE, NUM_STAGES, HAS_BIAS,
            HAS_LIMIT, SHORT_K, HAS_TAIL, WIDE, USE_ASM, USE_WGMMA, INTERPRET,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles", "tile_group", "xs_stride"])
def grouped_gemm(
    x_ptr, xs_ptr, w_ptr, s_ptr, tail_ptr, post_ptr, bias_ptr, out_ptr, slots_ptr, tiles_ptr, weights_ptr,
    num_tiles, tile_group, x_stride, xs_stride, num_cols, num_out, out_stride, num_blocks, num_steps,
    alpha, beta, limit,
    FORMAT: tl.constexpr, IS_FIRST: tl.constexpr, TOPK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP_K: tl.constexpr, WORDS: tl.constexpr, NUM_STAGES: tl.constexpr,
    NUM_HEIGHTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LIMIT: tl.constexpr,
    SHORT_K: tl.constexpr, HAS_TAIL: tl.constexpr, WIDE: tl.constexpr, IS_PITCHED: tl.constexpr,
    USE_ASM: tl.constexpr, USE_WGMMA: tl.constexpr, USE_PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """The same for many tokens: a tile is a run of slots sorted by expert, as `group.group_slots` wrote it.

    A run's last tile is often short: with NUM_HEIGHTS 2 or 3 it runs as one of half or a quarter of BLOCK_M rows.
    Grid: (weight tiles * num_tiles,).
    """
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    if not IS_PITCHED:
        out_stride = num_out
    # Programs that run together share weights: a group of tiles walks through all weight tiles.
    num_n = tl.cdiv(num_blocks * 64, BLOCK_N)
    group = tl.program_id(0) // (num_n * tile_group)
    width = tl.minimum(num_tiles - group * tile_group, tile_group)
    in_group = tl.program_id(0) - group * num_n * tile_group
    tile = group * tile_group + in_group % width
    block = in_group // width
    expert = tl.load(tiles_ptr + tile * 3)
    if expert < 0:
        return
    start = tl.load(tiles_ptr + tile * 3 + 1)
    end = tl.load(tiles_ptr + tile * 3 + 2)
    num_rows = tl.minimum(end - start, BLOCK_M)
    for shift in tl.static_range(NUM_HEIGHTS):  # the lowest tile that holds all rows runs
        is_high_enough = num_rows <= (BLOCK_M >> shift)
        is_lowest = (shift == NUM_HEIGHTS - 1) | (num_rows > (BLOCK_M >> (shift + 1)))
        if is_high_enough & is_lowest:
            position = start + tl.arange(0, BLOCK_M >> shift)
            slot_M = tl.load(slots_ptr + position, mask=position < end, other=-1)
            _tile(
                x_ptr, xs_ptr, w_ptr, s_ptr, tail_ptr, post_ptr, bias_ptr, out_ptr, weights_ptr, None, None,
                expert, slot_M, block, 0, x_stride, xs_stride, num_cols, num_out, out_stride, num_blocks, num_steps,
                alpha, beta, limit,
                FORMAT, IS_FIRST, TOPK, BLOCK_M >> shift, BLOCK_N, STEP_K, WORDS, 1, 1, NUM_STAGES, HAS_BIAS,
                HAS_LIMIT, SHORT_K, HAS_TAIL, WIDE, USE_ASM, USE_WGMMA, INTERPRET,
            )  # fmt: skip
