"""Device code of `model.attention.triton` for latent attention (MLA, absorbed), where all heads share a token's key.

A key is a latent of C numbers followed by a rope part of P; the value is the latent. A program loads each latent once,
multiplies it with the queries of its heads, and uses it again as the value. `merge_parts` joins the parts of a decode.
Before, `store_latents` makes keys and queries of what the projections give.

Shape letters: T tokens of the step, B requests, H query heads, D key dim (C + P), M rows of a program (queries times
heads), N keys of an iteration, S parts of a request's keys.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from model.attention.triton_kernels import (
    VIEWS,
    cos_and_sin,
    find_slots,
    hide_keys,
    read_kv,
    request_of_block,
    rotate_pairs,
    softmax_step,
    store_kv,
    with_sink,
)


@triton.jit(do_not_specialize_on_alignment=VIEWS)
def store_latents(
    q_pe_ptr, q_ptr, latents_ptr, norm_ptr, rotation_ptr, slots_ptr, keys_ptr,
    pe_stride, pe_head_stride, q_stride, latents_stride, eps,
    NUM_HEADS: tl.constexpr, C: tl.constexpr, P: tl.constexpr, C_PAD: tl.constexpr, P_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr, IS_FP8: tl.constexpr, USE_CAST: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Norm a token's latent and rotate its k_pe, into its slot; rotate q_pe, behind each query's own latent.

    `latents` [T, C + P], `q_pe` [T, H, P], `rotation` cos and sin of pairs of neighbours, fp32 [T, P].
    Grid: (T, 1 + ceil(H / BLOCK_H)); the first program of a token has its key, each other one BLOCK_H heads.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) - 1
    c = tl.arange(0, C_PAD)
    p = tl.arange(0, P_PAD)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    if block < 0:
        row = tl.arange(0, 1).to(tl.int64) + token
        mask_1P = (row >= 0)[:, None] & (p < P)[None, :]
        key_ptr = keys_ptr + tl.load(slots_ptr + token) * (C + P)
        latent_C = tl.load(latents_ptr + token * latents_stride + c, mask=c < C, other=0.0)
        k_pe_1P = tl.load(latents_ptr + (row * latents_stride + C)[:, None] + p[None, :], mask=mask_1P, other=0.0)
        cos_1P, sin_1P = cos_and_sin(rotation_ptr, row, mask_1P, P, P_PAD, 1)
        k_pe_1P = rotate_pairs(k_pe_1P, cos_1P, sin_1P, 1, P_PAD).to(k_pe_1P.dtype)
        wide_C = latent_C.to(tl.float32)
        normed_C = wide_C * tl.rsqrt(tl.sum(wide_C * wide_C, 0) / C + eps)
        normed_C *= tl.load(norm_ptr + c, mask=c < C, other=0.0)
        store_kv(key_ptr + c, normed_C.to(latent_C.dtype), c < C, IS_FP8, USE_CAST)
        store_kv(key_ptr + C + p[None, :], k_pe_1P, mask_1P, IS_FP8, USE_CAST)
    else:
        head_H = block * BLOCK_H + tl.arange(0, BLOCK_H)
        mask_HP = (head_H < NUM_HEADS)[:, None] & (p < P)[None, :]
        q_pe_HP = tl.load(
            q_pe_ptr + token * pe_stride + head_H[:, None] * pe_head_stride + p[None, :], mask=mask_HP, other=0.0
        )
        cos_HP, sin_HP = cos_and_sin(rotation_ptr, token + head_H * 0, mask_HP, P, P_PAD, BLOCK_H)
        rotated_HP = rotate_pairs(q_pe_HP, cos_HP, sin_HP, BLOCK_H, P_PAD)
        q_ptrs = q_ptr + token * q_stride + head_H[:, None] * (C + P) + C + p[None, :]
        tl.store(q_ptrs, rotated_HP.to(q_ptr.dtype.element_ty), mask=mask_HP)


@triton.jit
def _attend(
    q_MC, q_MP, acc_MC, max_M, sum_M, keys_ptr, table_ptr, start, end, query_pos_M, scale,
    C: tl.constexpr, P: tl.constexpr, C_PAD: tl.constexpr, P_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, IS_MASKED: tl.constexpr, PRECISION: tl.constexpr,
    IS_FP8: tl.constexpr, USE_CAST: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, over the keys `start` to `start + BLOCK_N` of one request that lie before `end`.

    Unmasked: all BLOCK_N keys are visible to every query.
    """
    positions_N = start + tl.arange(0, BLOCK_N)
    c = tl.arange(0, C_PAD)
    p = tl.arange(0, P_PAD)
    slots_N = find_slots(table_ptr, positions_N, end, PAGE_SIZE, IS_MASKED)
    key_ptrs = keys_ptr + slots_N[:, None] * (C + P)
    mask_NC = (c < C)[None, :]
    mask_NP = (p < P)[None, :]
    if IS_MASKED:
        mask_NC = (positions_N < end)[:, None] & mask_NC
        mask_NP = (positions_N < end)[:, None] & mask_NP
    latent_NC = tl.load(key_ptrs + c[None, :], mask=mask_NC, other=0)
    rope_NP = tl.load(key_ptrs + C + p[None, :], mask=mask_NP, other=0)
    latent_NC = read_kv(latent_NC, q_MC, IS_FP8, USE_CAST)
    rope_NP = read_kv(rope_NP, q_MC, IS_FP8, USE_CAST)
    products_MN = tl.dot(q_MC, tl.trans(latent_NC), input_precision=PRECISION)
    products_MN = tl.dot(q_MP, tl.trans(rope_NP), products_MN, input_precision=PRECISION)
    if IS_MASKED:
        products_MN = hide_keys(products_MN, positions_N, end, query_pos_M, WINDOW)
    probs_MN, decay_M, max_M, sum_M = softmax_step(products_MN, scale, max_M, sum_M)
    acc_MC = acc_MC * decay_M[:, None]
    acc_MC = tl.dot(probs_MN.to(q_MC.dtype), latent_NC, acc_MC, input_precision=PRECISION)
    return acc_MC, max_M, sum_M


@triton.jit
def _attend_range(
    q_MC, q_MP, keys_ptr, table_ptr, start, end, first_pos, query_pos_M, scale,
    C: tl.constexpr, P: tl.constexpr, C_PAD: tl.constexpr, P_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, IS_FP8: tl.constexpr,
    USE_CAST: tl.constexpr,
):  # fmt: skip
    """Sums, maxima and sums of weights over the keys `start` to `end`. `first_pos`: position of the first query."""
    acc_MC = tl.zeros(q_MC.shape, tl.float32)
    max_M = tl.full((q_MC.shape[0],), float("-inf"), tl.float32)
    sum_M = tl.zeros((q_MC.shape[0],), tl.float32)
    if WINDOW == 0:
        # Keys of whole blocks that every query sees.
        num_whole = tl.maximum(tl.minimum(end, first_pos + 1) - start, 0) // BLOCK_N * BLOCK_N
        for n in range(start, start + num_whole, BLOCK_N):
            acc_MC, max_M, sum_M = _attend(
                q_MC, q_MP, acc_MC, max_M, sum_M, keys_ptr, table_ptr, n, end, query_pos_M, scale,
                C, P, C_PAD, P_PAD, BLOCK_N, PAGE_SIZE, WINDOW, False, PRECISION, IS_FP8, USE_CAST,
            )  # fmt: skip
        start += num_whole
    for n in range(start, end, BLOCK_N):
        acc_MC, max_M, sum_M = _attend(
            q_MC, q_MP, acc_MC, max_M, sum_M, keys_ptr, table_ptr, n, end, query_pos_M, scale,
            C, P, C_PAD, P_PAD, BLOCK_N, PAGE_SIZE, WINDOW, True, PRECISION, IS_FP8, USE_CAST,
        )  # fmt: skip
    return acc_MC, max_M, sum_M


@triton.jit(do_not_specialize=["table_stride", "num_requests", "num_parts"], do_not_specialize_on_alignment=VIEWS)
def latent_attention(
    q_ptr, keys_ptr, table_ptr, query_start_ptr, lens_ptr, sinks_ptr, out_ptr, parts_ptr, stats_ptr,
    scale, q_stride, table_stride, num_requests, num_parts,
    NUM_HEADS: tl.constexpr, C: tl.constexpr, P: tl.constexpr, C_PAD: tl.constexpr, P_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, IS_DECODE: tl.constexpr, IS_SPLIT: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr, IS_FP8: tl.constexpr, USE_CAST: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Attends for BLOCK_Q queries of one request with BLOCK_H heads. Grid: (blocks * ceil(H / BLOCK_H), S).

    IS_DECODE: serves the requests with one token, one block each, and BLOCK_Q is 1. Otherwise serves the requests with
    several, in T // BLOCK_Q + B blocks (see `request_of_block`), and S is 1. The programs that share keys are
    neighbours in the grid, so all but the first find them in the L2.
    If IS_SPLIT, part s takes the s-th share of the keys and writes what `merge_parts` reads.
    """
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    NUM_TILES: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    first_head = tl.program_id(0) % NUM_TILES * BLOCK_H
    request = tl.program_id(0) // NUM_TILES
    first_query = 0
    if not IS_DECODE:
        block = tl.num_programs(0) // NUM_TILES - 1 - request  # late queries, which have the most keys, go first
        request = request_of_block(query_start_ptr, block, num_requests, BLOCK_Q)
        first_query = (block - tl.load(query_start_ptr + request) // BLOCK_Q - request) * BLOCK_Q
    row = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - row
    if (num_queries == 1) != IS_DECODE or first_query >= num_queries:
        return
    m = tl.arange(0, BLOCK_Q * BLOCK_H)
    c = tl.arange(0, C_PAD)
    p = tl.arange(0, P_PAD)
    query_M = first_query + m // BLOCK_H
    head_M = first_head + m % BLOCK_H
    is_row_M = (query_M < num_queries) & (head_M < NUM_HEADS)
    row_M = (row + query_M).to(tl.int64)
    q_ptrs = q_ptr + row_M[:, None] * q_stride + head_M[:, None] * (C + P)
    q_MC = tl.load(q_ptrs + c[None, :], mask=is_row_M[:, None] & (c < C)[None, :], other=0.0)
    q_MP = tl.load(q_ptrs + C + p[None, :], mask=is_row_M[:, None] & (p < P)[None, :], other=0.0)

    first_pos = tl.load(lens_ptr + request) - num_queries + first_query
    position_M = first_pos + m // BLOCK_H
    end = first_pos + tl.minimum(BLOCK_Q, num_queries - first_query)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(first_pos - WINDOW + 1, 0)
    if IS_SPLIT:
        blocks_per_part = tl.cdiv(tl.cdiv(end - start, BLOCK_N), num_parts)
        start += tl.program_id(1) * blocks_per_part * BLOCK_N
        end = tl.minimum(start + blocks_per_part * BLOCK_N, end)
    table_ptr += request.to(tl.int64) * table_stride
    acc_MC, max_M, sum_M = _attend_range(
        q_MC, q_MP, keys_ptr, table_ptr, start, end, first_pos, position_M, scale,
        C, P, C_PAD, P_PAD, BLOCK_N, PAGE_SIZE, WINDOW, PRECISION, IS_FP8, USE_CAST,
    )  # fmt: skip
    mask_MC = is_row_M[:, None] & (c < C)[None, :]
    if IS_SPLIT:
        place_M = (request * NUM_HEADS + head_M).to(tl.int64) * num_parts + tl.program_id(1)
        tl.store(parts_ptr + place_M[:, None] * C + c[None, :], acc_MC, mask=mask_MC & (start < end))
        tl.store(stats_ptr + 2 * place_M, max_M, mask=is_row_M)
        tl.store(stats_ptr + 2 * place_M + 1, sum_M, mask=is_row_M)
    else:
        out_MC = with_sink(acc_MC, max_M, sum_M, sinks_ptr, head_M, is_row_M, HAS_SINKS)
        out_ptrs = out_ptr + (row_M[:, None] * NUM_HEADS + head_M[:, None]) * C + c[None, :]
        tl.store(out_ptrs, out_MC.to(out_ptr.dtype.element_ty), mask=mask_MC)
