"""Gated activation between two grouped GEMMs, rounded to E4M3: only the rows that hold tokens are read or written.

Shape letters: E experts, M rows per expert, I intermediate, F = 2I, G groups of 128 columns, W scale words, R rows.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from moe.config import Activation
from moe.formats.token_groups import GROUP
from moe.kernels.bits import encode_e4m3
from moe.kernels.compile_ahead import launch

_BLOCK_R = 16
_PROGRAMS = 1024  # row programs over all experts; each group of columns has its own
_PITCH = 4  # elements: TMA needs columns of scales to start on multiples of 16 bytes


@triton.jit
def masked_swiglu_kernel(
    h_ptr, counts_ptr, q_ptr, scale_ptr, num_rows, num_groups, pitch, alpha, beta, limit,
    HAS_LIMIT: tl.constexpr, UE8M0: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr, USE_CAST: tl.constexpr,
):  # fmt: skip
    """bf16 h [E, M, 2I] as [gate, up] to bytes q [E, M, I] and scales [E, W, pitch], of the first counts[e] rows.

    W is a word per group: fp32 amax / 448; with UE8M0 a word per four groups: int32 with a byte of exponent each, the
    lowest group in the lowest byte, 0 past the last. Grid: (E, programs that share an expert's rows, W).
    """
    expert = tl.program_id(0).to(tl.int64)
    word = tl.program_id(2)
    count = tl.load(counts_ptr + expert)
    num_cols = num_groups * GROUP
    col_C = tl.arange(0, GROUP)
    for first in range(tl.program_id(1) * BLOCK_R, count, tl.num_programs(1) * BLOCK_R):
        row_R = first + tl.arange(0, BLOCK_R)
        is_row_R = row_R < count
        at_R = expert * num_rows + row_R
        packed_R = tl.zeros((BLOCK_R,), tl.int32)
        for index in tl.static_range(4 if UE8M0 else 1):
            group = word * 4 + index if UE8M0 else word
            mask_RC = is_row_R[:, None] & (group * GROUP + col_C < num_cols)[None, :]
            from_RC = at_R[:, None] * (2 * num_cols) + group * GROUP + col_C[None, :]
            gate_RC = tl.load(h_ptr + from_RC, mask=mask_RC, other=0.0).to(tl.float32)
            up_RC = tl.load(h_ptr + from_RC + num_cols, mask=mask_RC, other=0.0).to(tl.float32)
            if HAS_LIMIT:
                gate_RC = tl.minimum(gate_RC, limit)
                up_RC = tl.minimum(tl.maximum(up_RC, -limit), limit)
            y_RC = gate_RC * tl.sigmoid(alpha * gate_RC) * (up_RC + beta)
            scale_R = tl.maximum(tl.max(tl.abs(y_RC), axis=1), 1e-10) / 448.0
            if UE8M0:
                exponent_R = (scale_R.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23  # up to the next power of two
                scale_R = (exponent_R << 23).to(tl.float32, bitcast=True)
                packed_R |= tl.where(group < num_groups, exponent_R << (8 * index), 0)
            q_RC = encode_e4m3(tl.minimum(tl.maximum(y_RC / scale_R[:, None], -448.0), 448.0), USE_CAST)
            tl.store(q_ptr + at_R[:, None] * num_cols + group * GROUP + col_C[None, :], q_RC, mask=mask_RC)
            if not UE8M0:
                tl.store(scale_ptr + (expert * num_groups + word) * pitch + row_R, scale_R, mask=is_row_R)
        if UE8M0:
            tl.store(scale_ptr + (expert * tl.num_programs(2) + word) * pitch + row_R, packed_R, mask=is_row_R)


def masked_swiglu(
    h_EMF: torch.Tensor, counts_E: torch.Tensor, activation: Activation, *, ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [E, M, I], scales [E, M, G] fp32 or [E, M, ceil(G/4)] int32, stride 1 along M), garbage past the counts.

    `h_EMF` contiguous bf16 [gate, up], I a multiple of 128; `counts_E` int32 on the same device, which alone reads it.
    """
    num_experts, num_rows, num_both = h_EMF.shape
    num_groups = num_both // 2 // GROUP
    num_words = triton.cdiv(num_groups, 4) if ue8m0 else num_groups
    pitch = triton.cdiv(num_rows, _PITCH) * _PITCH
    q_EMI = h_EMF.new_empty((num_experts, num_rows, num_both // 2), dtype=torch.float8_e4m3fn)
    scale_EWM = h_EMF.new_empty((num_experts, num_words, pitch), dtype=torch.int32 if ue8m0 else torch.float32)
    num_programs = min(triton.cdiv(num_rows, _BLOCK_R), max(1, _PROGRAMS // num_experts))
    launch(masked_swiglu_kernel, (num_experts, num_programs, num_words))(
        h_EMF, counts_E, q_EMI.view(torch.uint8), scale_EWM, num_rows, num_groups, pitch,
        activation.alpha, activation.beta, 0.0 if activation.limit is None else activation.limit,
        HAS_LIMIT=activation.limit is not None, UE8M0=ue8m0, GROUP=GROUP, BLOCK_R=_BLOCK_R,
        USE_CAST=not bool(triton.knobs.runtime.interpret), num_warps=4,
    )  # fmt: skip
    return q_EMI, scale_EWM[..., :num_rows].transpose(-1, -2)
