"""Activations to E4M3, one scale per row and step of K, in the byte order of the packed FP8 weights. Device code."""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe.kernels.bits import encode_e4m3


@triton.jit(do_not_specialize=["num_rows"])
def quantize_rows(
    x_ptr, ids_ptr, q_ptr, scale_ptr, num_rows, x_stride, num_cols, num_steps,
    BY_SLOT: tl.constexpr, STEP_K: tl.constexpr, BLOCK_R: tl.constexpr, SHORT_K: tl.constexpr,
    USE_CAST: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """bf16 x [R, K] to bytes q [R, S * STEP_K] and scales [S, R], scale = amax / 448 and 1 for a row of zeros.

    BY_SLOT: rows are slots, and those with id -1 hold nothing: they are read as zeros.
    Within a step the bytes alternate between its two halves, as in the packed weights. Grid: (rows / BLOCK_R, S).
    """
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    row_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    step = tl.program_id(1)
    is_row_R = row_R < num_rows
    if BY_SLOT:
        has_data_R = is_row_R & (tl.load(ids_ptr + row_R, mask=is_row_R, other=-1) >= 0)
    else:
        has_data_R = is_row_R
    place_K = tl.arange(0, STEP_K)
    col_K = place_K % 2 * (STEP_K // 2) + place_K // 2
    if not SHORT_K:
        first = tl.minimum(step * STEP_K, num_cols - STEP_K)
    else:
        first = 0
    offsets_RK = row_R.to(tl.int64)[:, None] * x_stride + first + col_K[None, :]
    x_RK = tl.load(x_ptr + offsets_RK, mask=has_data_R[:, None] & (first + col_K < num_cols)[None, :], other=0.0)
    x_RK = x_RK.to(tl.float32)
    amax_R = tl.max(tl.abs(x_RK), axis=1)
    scale_R = tl.where(amax_R > 0, amax_R / 448.0, 1.0)
    q_RK = encode_e4m3(tl.minimum(tl.maximum(x_RK / scale_R[:, None], -448.0), 448.0), USE_CAST)
    q_ptrs = q_ptr + row_R.to(tl.int64)[:, None] * (num_steps * STEP_K) + step * STEP_K + place_K[None, :]
    tl.store(q_ptrs, q_RK, mask=is_row_R[:, None])
    tl.store(scale_ptr + step.to(tl.int64) * num_rows + row_R, scale_R, mask=is_row_R)
