"""Device code of `model.attention.triton`: rope and KV write, decode in parts, prefill in blocks of queries.

`latent_kernels` has the kernel of latent attention (MLA), which shares the parts below that know no head shapes.

Shape letters: T tokens of the step, B requests, H query heads, G KV heads, R query heads per KV head, D key dim,
V value dim, S parts of a request's keys, P pages of the longest request.

Scores are exponents of two (`scale` includes log2(e)), because the hardware has exp2. Slots that a request does not
own are never loaded, so their contents (NaN included) never enter a product. An FP8 cache comes as bytes (IS_FP8).
Where the GPU has no such type, and in the interpreter, bit operations convert them (USE_CAST is false).
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe.kernels.bits import decode_e4m3, encode_e4m3

LOG2_E = tl.constexpr(1.4426950408889634)

_E4M3_MAX = tl.constexpr(448.0)

# Views of one buffer start at any element: their alignment must not be a reason to compile once more.
VIEWS = ["slots_ptr", "table_ptr", "query_start_ptr", "lens_ptr"]


@triton.jit
def store_kv(ptrs, values, mask, IS_FP8: tl.constexpr, USE_CAST: tl.constexpr):
    """Write to the cache in its number format: FP8 is rounded to nearest even and saturated; NaN stays NaN."""
    if IS_FP8:
        values = values.to(tl.float32)
        codes = encode_e4m3(tl.minimum(tl.maximum(values, -_E4M3_MAX), _E4M3_MAX), USE_CAST)
        is_nan = values != values  # noqa: PLR0124
        tl.store(ptrs, tl.where(is_nan, 0x7F, codes).to(tl.uint8), mask=mask)
    else:
        tl.store(ptrs, values.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def read_kv(stored, like, IS_FP8: tl.constexpr, USE_CAST: tl.constexpr):
    """Numbers of the cache in the dtype of `like`. Without USE_CAST, a NaN of an FP8 cache reads as 480."""
    if IS_FP8 and USE_CAST:
        numbers = stored.to(tl.float8e4nv, bitcast=True)
    elif IS_FP8:
        numbers = decode_e4m3(stored)
    else:
        numbers = stored
    return numbers.to(like.dtype)


@triton.jit
def rotate_pairs(x_MD, cos_MP, sin_MP, M: tl.constexpr, D_PAD: tl.constexpr):
    """Rotate every pair of neighbours, in fp32."""
    even_MP, odd_MP = tl.split(tl.reshape(x_MD.to(tl.float32), (M, D_PAD // 2, 2)))
    rotated_MP2 = tl.join(even_MP * cos_MP - odd_MP * sin_MP, even_MP * sin_MP + odd_MP * cos_MP)
    return tl.reshape(rotated_MP2, (M, D_PAD))


@triton.jit
def cos_and_sin(rotation_ptr, row_M, mask_MD, D: tl.constexpr, D_PAD: tl.constexpr, M: tl.constexpr):
    """Both [M, D_PAD / 2], from pairs of them."""
    d = tl.arange(0, D_PAD)
    pairs_MD = tl.load(rotation_ptr + row_M[:, None] * D + d[None, :], mask=mask_MD, other=0.0)
    return tl.split(tl.reshape(pairs_MD, (M, D_PAD // 2, 2)))


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=VIEWS)
def rotate_and_store(
    q_ptr, k_ptr, v_ptr, rotation_ptr, slots_ptr, keys_ptr, values_ptr, num_tokens, q_stride, k_stride, v_stride,
    NUM_KV_HEADS: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    D_PAD: tl.constexpr, V_PAD: tl.constexpr, BLOCK_T: tl.constexpr, HAS_ROTATION: tl.constexpr,
    HAS_VALUES: tl.constexpr, IS_FP8: tl.constexpr, USE_CAST: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Rotate the query heads of one KV head in place; copy its rotated key and its value to the slot.

    `rotation` holds cos and sin of every pair of neighbours, fp32 [T, D]. Grid: (T / BLOCK_T, G).
    """
    first = tl.program_id(0) * BLOCK_T
    kv_head = tl.program_id(1)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    row_T = (first + tl.arange(0, BLOCK_T)).to(tl.int64)
    is_token_T = row_T < num_tokens
    slot_T = tl.load(slots_ptr + row_T, mask=is_token_T, other=0)
    d = tl.arange(0, D_PAD)
    mask_TD = is_token_T[:, None] & (d < D)[None, :]
    key_TD = tl.load(k_ptr + row_T[:, None] * k_stride + kv_head * D + d[None, :], mask=mask_TD, other=0.0)
    if HAS_ROTATION:
        M: tl.constexpr = BLOCK_T * R_PAD
        m = tl.arange(0, M)
        row_M = (first + m // R_PAD).to(tl.int64)
        mask_MD = ((row_M < num_tokens) & (m % R_PAD < R))[:, None] & (d < D)[None, :]
        q_ptrs = q_ptr + row_M[:, None] * q_stride + (kv_head * R + m % R_PAD)[:, None] * D + d[None, :]
        q_MD = tl.load(q_ptrs, mask=mask_MD, other=0.0)
        cos_MP, sin_MP = cos_and_sin(rotation_ptr, row_M, mask_MD, D, D_PAD, M)
        tl.store(q_ptrs, rotate_pairs(q_MD, cos_MP, sin_MP, M, D_PAD).to(q_ptr.dtype.element_ty), mask=mask_MD)
        cos_TP, sin_TP = cos_and_sin(rotation_ptr, row_T, mask_TD, D, D_PAD, BLOCK_T)
        key_TD = rotate_pairs(key_TD, cos_TP, sin_TP, BLOCK_T, D_PAD)
    place_T = slot_T * NUM_KV_HEADS + kv_head
    store_kv(keys_ptr + place_T[:, None] * D + d[None, :], key_TD, mask_TD, IS_FP8, USE_CAST)
    if HAS_VALUES:
        v = tl.arange(0, V_PAD)
        mask_TV = is_token_T[:, None] & (v < V)[None, :]
        value_TV = tl.load(v_ptr + row_T[:, None] * v_stride + kv_head * V + v[None, :], mask=mask_TV, other=0.0)
        store_kv(values_ptr + place_T[:, None] * V + v[None, :], value_TV, mask_TV, IS_FP8, USE_CAST)


@triton.jit
def find_slots(table_ptr, positions_N, end, PAGE_SIZE: tl.constexpr, IS_MASKED: tl.constexpr):
    """Slots of a request's keys; where masked, keys from `end` on get a slot that must not be read."""
    if IS_MASKED:
        pages_N = tl.load(table_ptr + positions_N // PAGE_SIZE, mask=positions_N < end, other=0)
    else:
        pages_N = tl.load(table_ptr + positions_N // PAGE_SIZE)
    return pages_N.to(tl.int64) * PAGE_SIZE + positions_N % PAGE_SIZE


@triton.jit
def hide_keys(products_MN, positions_N, end, query_pos_M, WINDOW: tl.constexpr):
    """-inf for the keys that a query does not see: those from `end` on, later ones, and those before its window."""
    is_visible_MN = (positions_N < end)[None, :] & (positions_N[None, :] <= query_pos_M[:, None])
    if WINDOW > 0:
        is_visible_MN &= query_pos_M[:, None] - positions_N[None, :] < WINDOW
    return tl.where(is_visible_MN, products_MN, float("-inf"))


@triton.jit
def softmax_step(products_MN, scale, max_M, sum_M):
    """Online softmax: weights of these keys, the factor for what was summed before, the new maximum and sum.

    A score is `product * scale`. It is never kept: one fused multiply-add makes the exponent of a weight.
    """
    new_max_M = tl.maximum(max_M, tl.max(products_MN, 1) * scale)
    # A query that has seen no key yet has a maximum of -inf: keep -inf - -inf out of exp2.
    base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    probs_MN = tl.math.exp2(products_MN * scale - base_M[:, None])
    decay_M = tl.math.exp2(max_M - base_M)
    return probs_MN, decay_M, new_max_M, sum_M * decay_M + tl.sum(probs_MN, 1)


@triton.jit
def _attend(
    q_MD, acc_MV, max_M, sum_M, keys_ptr, values_ptr, table_ptr, start, end, query_pos_M, scale, kv_head,
    NUM_KV_HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr, IS_FP8: tl.constexpr, USE_CAST: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, over the keys `start` to `start + BLOCK_N` of one request that lie before `end`.

    Unmasked: all BLOCK_N keys are visible to every query.
    """
    positions_N = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_PAD)
    v = tl.arange(0, V_PAD)
    slots_N = find_slots(table_ptr, positions_N, end, PAGE_SIZE, IS_MASKED)
    key_ptrs = keys_ptr + (slots_N[None, :] * NUM_KV_HEADS + kv_head) * D + d[:, None]
    value_ptrs = values_ptr + (slots_N[:, None] * NUM_KV_HEADS + kv_head) * V + v[None, :]
    if IS_MASKED:
        is_key_N = positions_N < end
        k_DN = tl.load(key_ptrs, mask=is_key_N[None, :] & (d < D)[:, None], other=0)
        v_NV = tl.load(value_ptrs, mask=is_key_N[:, None] & (v < V)[None, :], other=0)
    else:
        k_DN = tl.load(key_ptrs, mask=(d < D)[:, None], other=0)
        v_NV = tl.load(value_ptrs, mask=(v < V)[None, :], other=0)
    k_DN = read_kv(k_DN, q_MD, IS_FP8, USE_CAST)
    v_NV = read_kv(v_NV, q_MD, IS_FP8, USE_CAST)
    products_MN = tl.dot(q_MD, k_DN, input_precision=PRECISION)
    if IS_MASKED:
        products_MN = hide_keys(products_MN, positions_N, end, query_pos_M, WINDOW)
    probs_MN, decay_M, max_M, sum_M = softmax_step(products_MN, scale, max_M, sum_M)
    acc_MV = acc_MV * decay_M[:, None]
    acc_MV = tl.dot(probs_MN.to(q_MD.dtype), v_NV, acc_MV, input_precision=PRECISION)
    return acc_MV, max_M, sum_M


@triton.jit
def with_sink(acc_MV, max_M, sum_M, sinks_ptr, head_M, is_head_M, HAS_SINKS: tl.constexpr):
    """The softmax's result: the sink adds to the denominator only."""
    if HAS_SINKS:
        sink_M = tl.load(sinks_ptr + head_M, mask=is_head_M, other=0.0).to(tl.float32) * LOG2_E
        new_max_M = tl.maximum(max_M, sink_M)
        decay_M = tl.math.exp2(max_M - new_max_M)
        return acc_MV * (decay_M / (sum_M * decay_M + tl.math.exp2(sink_M - new_max_M)))[:, None]
    return acc_MV / sum_M[:, None]


@triton.jit(do_not_specialize=["table_stride", "num_parts"], do_not_specialize_on_alignment=VIEWS)
def decode(
    q_ptr, keys_ptr, values_ptr, table_ptr, query_start_ptr, lens_ptr, sinks_ptr, out_ptr, parts_ptr, stats_ptr,
    scale, q_stride, table_stride, num_parts,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, R_PAD: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    D_PAD: tl.constexpr, V_PAD: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, IS_FP8: tl.constexpr,
    USE_CAST: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Attends for requests with one token; skips the others. Grid: (B, G, S); part s takes the s-th share of the keys.

    If S is 1, writes the result. Else each part writes sums [B, H, S, V] and (maximum, sum of weights) [B, H, S, 2],
    both fp32, for `merge_parts`. A part without keys writes a maximum of -inf and no sums.
    """
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(query_start_ptr + request)
    if tl.load(query_start_ptr + request + 1) - row != 1:
        return
    R: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    length = tl.load(lens_ptr + request)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    blocks_per_part = tl.cdiv(tl.cdiv(length - first, BLOCK_N), num_parts)
    start = first + part * blocks_per_part * BLOCK_N
    end = tl.minimum(start + blocks_per_part * BLOCK_N, length)

    r = tl.arange(0, R_PAD)
    d = tl.arange(0, D_PAD)
    v = tl.arange(0, V_PAD)
    head_R = kv_head * R + r
    is_head_R = r < R
    q_RD = tl.load(
        q_ptr + row.to(tl.int64) * q_stride + head_R[:, None] * D + d[None, :],
        mask=is_head_R[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    acc_RV = tl.zeros((R_PAD, V_PAD), tl.float32)
    max_R = tl.full((R_PAD,), float("-inf"), tl.float32)
    sum_R = tl.zeros((R_PAD,), tl.float32)
    position_R = tl.full((R_PAD,), 0, tl.int32) + length - 1
    table_ptr += request.to(tl.int64) * table_stride
    for n in range(start, end, BLOCK_N):
        acc_RV, max_R, sum_R = _attend(
            q_RD, acc_RV, max_R, sum_R, keys_ptr, values_ptr, table_ptr, n, end, position_R, scale, kv_head,
            NUM_KV_HEADS, D, V, D_PAD, V_PAD, BLOCK_N, PAGE_SIZE, 0, True, PRECISION, IS_FP8,
            USE_CAST,
        )  # fmt: skip
    mask_RV = is_head_R[:, None] & (v < V)[None, :]
    if not IS_SPLIT:
        out_RV = with_sink(acc_RV, max_R, sum_R, sinks_ptr, head_R, is_head_R, HAS_SINKS)
        out_ptrs = out_ptr + (row.to(tl.int64) * NUM_HEADS + head_R[:, None]) * V + v[None, :]
        tl.store(out_ptrs, out_RV.to(out_ptr.dtype.element_ty), mask=mask_RV)
    else:
        place_R = (request * NUM_HEADS + head_R).to(tl.int64) * num_parts + part
        tl.store(parts_ptr + place_R[:, None] * V + v[None, :], acc_RV, mask=mask_RV & (start < end))
        tl.store(stats_ptr + 2 * place_R, max_R, mask=is_head_R)
        tl.store(stats_ptr + 2 * place_R + 1, sum_R, mask=is_head_R)


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=VIEWS)
def merge_parts(
    parts_ptr, stats_ptr, query_start_ptr, sinks_ptr, out_ptr, num_parts,
    NUM_HEADS: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, S_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Join the parts of `decode` and add the sink. Grid: (B, H)."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(query_start_ptr + request)
    if tl.load(query_start_ptr + request + 1) - row != 1:
        return
    s = tl.arange(0, S_PAD)
    v = tl.arange(0, V_PAD)
    place = (request * NUM_HEADS + head).to(tl.int64) * num_parts
    is_part_S = s < num_parts
    max_S = tl.load(stats_ptr + 2 * (place + s), mask=is_part_S, other=float("-inf"))
    sum_S = tl.load(stats_ptr + 2 * (place + s) + 1, mask=is_part_S, other=0.0)
    has_keys_S = max_S > float("-inf")
    acc_SV = tl.load(
        parts_ptr + (place + s)[:, None] * V + v[None, :], mask=has_keys_S[:, None] & (v < V)[None, :], other=0.0
    )
    largest = tl.max(max_S, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
    decay_S = tl.math.exp2(max_S - largest)
    total = tl.sum(sum_S * decay_S, 0)
    if HAS_SINKS:
        total += tl.math.exp2(sink - largest)
    out_V = tl.sum(acc_SV * decay_S[:, None], 0) / total
    out_ptrs = out_ptr + (row.to(tl.int64) * NUM_HEADS + head) * V + v
    tl.store(out_ptrs, out_V.to(out_ptr.dtype.element_ty), mask=v < V)


@triton.jit
def request_of_block(query_start_ptr, block, num_requests, BLOCK_Q: tl.constexpr):
    """The request a block of queries belongs to. Request b has blocks `query_start[b] // BLOCK_Q + b` and following.

    That leaves room for each request's ragged last block; surplus blocks have no queries.
    """
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["table_stride", "num_requests"], do_not_specialize_on_alignment=VIEWS)
def prefill(
    q_ptr, keys_ptr, values_ptr, table_ptr, query_start_ptr, lens_ptr, sinks_ptr, out_ptr,
    num_requests, scale, q_stride, table_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, R_PAD: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    D_PAD: tl.constexpr, V_PAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, IS_FP8: tl.constexpr,
    USE_CAST: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Attends for requests with several tokens; `decode` serves those with one. Grid: (T // BLOCK_Q + B, G).

    A program takes BLOCK_Q queries with the R heads that share a KV head: BLOCK_Q * R_PAD rows. Late queries, which
    have the most keys, go first.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    request = request_of_block(query_start_ptr, block, num_requests, BLOCK_Q)
    row = tl.load(query_start_ptr + request)
    num_queries = tl.load(query_start_ptr + request + 1) - row
    first_query = (block - row // BLOCK_Q - request) * BLOCK_Q
    if num_queries < 2 or first_query >= num_queries:
        return
    R: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    m = tl.arange(0, BLOCK_Q * R_PAD)
    d = tl.arange(0, D_PAD)
    v = tl.arange(0, V_PAD)
    query_M = first_query + m // R_PAD
    head_M = kv_head * R + m % R_PAD
    is_row_M = (query_M < num_queries) & (m % R_PAD < R)
    row_M = (row + query_M).to(tl.int64)
    q_MD = tl.load(
        q_ptr + row_M[:, None] * q_stride + head_M[:, None] * D + d[None, :],
        mask=is_row_M[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    first_pos = tl.load(lens_ptr + request) - num_queries + first_query
    end = first_pos + tl.minimum(BLOCK_Q, num_queries - first_query)
    position_M = first_pos + m // R_PAD
    acc_MV = tl.zeros((BLOCK_Q * R_PAD, V_PAD), tl.float32)
    max_M = tl.full((BLOCK_Q * R_PAD,), float("-inf"), tl.float32)
    sum_M = tl.zeros((BLOCK_Q * R_PAD,), tl.float32)
    table_ptr += request.to(tl.int64) * table_stride
    start = 0
    if WINDOW > 0:
        start = tl.maximum(first_pos - WINDOW + 1, 0)
    else:
        num_whole = (first_pos + 1) // BLOCK_N  # blocks in which every query sees every key
        for n in range(0, num_whole * BLOCK_N, BLOCK_N):
            acc_MV, max_M, sum_M = _attend(
                q_MD, acc_MV, max_M, sum_M, keys_ptr, values_ptr, table_ptr, n, end, position_M, scale, kv_head,
                NUM_KV_HEADS, D, V, D_PAD, V_PAD, BLOCK_N, PAGE_SIZE, WINDOW, False, PRECISION, IS_FP8,
                USE_CAST,
            )  # fmt: skip
        start = num_whole * BLOCK_N
    for n in range(start, end, BLOCK_N):
        acc_MV, max_M, sum_M = _attend(
            q_MD, acc_MV, max_M, sum_M, keys_ptr, values_ptr, table_ptr, n, end, position_M, scale, kv_head,
            NUM_KV_HEADS, D, V, D_PAD, V_PAD, BLOCK_N, PAGE_SIZE, WINDOW, True, PRECISION, IS_FP8,
            USE_CAST,
        )  # fmt: skip
    out_MV = with_sink(acc_MV, max_M, sum_M, sinks_ptr, head_M, is_row_M, HAS_SINKS)
    out_ptrs = out_ptr + (row_M[:, None] * NUM_HEADS + head_M[:, None]) * V + v[None, :]
    tl.store(out_ptrs, out_MV.to(out_ptr.dtype.element_ty), mask=is_row_M[:, None] & (v < V)[None, :])
