"""FP8 linear layers on GPUs: weights stay in the 128 x 128 blocks in which they are stored, activations are bf16.

A decode step reads every weight once and does little else, so half the bytes are half the time. Codes become bf16 in
registers, exactly, with instructions that every GPU since the A100 has; sums are fp32, and the scale of a block
multiplies the sum over its 128 columns. Nothing is rounded but the output.

Import it only where Triton is installed. Shape letters: T tokens, K inputs, N outputs, M token rows of a tile.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moe.device import num_processors
from moe.formats import Fp8BlockWeight
from moe.formats.fp8_block import BLOCK
from moe.kernels.bits import unpack_e4m3
from moe.kernels.compile_ahead import launch

_GROUP_TILES = 8  # token tiles that share weights in the L2, where there are many
_FEW_PROGRAMS = 132  # the multiprocessors of an H100, where the device does not say


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """Rows of weights and of tokens in a tile, and how the compiler pipelines it."""

    block_n: int
    block_m: int
    num_warps: int
    num_stages: int


DECODE_PLANS = (LinearPlan(64, 16, 4, 6), LinearPlan(32, 16, 4, 8), LinearPlan(16, 16, 2, 8))  # up to 16 tokens
BATCH_PLANS = (LinearPlan(64, 64, 4, 5), LinearPlan(32, 64, 4, 6), LinearPlan(16, 64, 4, 6))  # up to 64
PREFILL_PLANS = (LinearPlan(128, 128, 8, 3), LinearPlan(64, 128, 4, 3))


def choose_plan(num_tokens: int, num_outputs: int, num_processors: int) -> LinearPlan:
    """The plan with the tallest tiles of weights that still gives every processor one, else the shortest."""
    plans = DECODE_PLANS if num_tokens <= 16 else BATCH_PLANS if num_tokens <= 64 else PREFILL_PLANS
    for plan in plans:
        if triton.cdiv(num_outputs, plan.block_n) * triton.cdiv(num_tokens, plan.block_m) >= num_processors:
            return plan
    return plans[-1]


@triton.jit
def fp8_block_gemm(
    x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, num_tokens, num_out, num_cols, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    USE_ASM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """`out[T, N] = x[T, K] @ w[N, K].T + bias`; `w_ptr` counts in 16-bit words of two codes, scales are [N/128, K/128].

    Grid: tiles of tokens x tiles of weights; GROUP tiles of tokens at a time walk along the weights together.
    """
    num_m, num_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(num_out, BLOCK_N)
    group, within = tl.program_id(0) // (GROUP * num_n), tl.program_id(0) % (GROUP * num_n)
    height = tl.minimum(num_m - group * GROUP, GROUP)
    first_m = (group * GROUP + within % height) * BLOCK_M
    first_n = within // height * BLOCK_N
    num_steps = tl.cdiv(num_cols, 128)
    token_M = first_m + tl.arange(0, BLOCK_M)
    row_N = first_n + tl.arange(0, BLOCK_N)
    # Rows past the end repeat the last one; they are not stored.
    x_ptrs = x_ptr + tl.minimum(token_M, num_tokens - 1).to(tl.int64)[:, None] * x_stride + tl.arange(0, 128)[None, :]
    words = num_cols // 2
    w_ptrs = w_ptr + tl.minimum(row_N, num_out - 1).to(tl.int64)[:, None] * words + tl.arange(0, 64)[None, :]
    scale_ptr += first_n // 128 * num_steps
    acc_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(num_steps):
        if EVEN_K:
            w_words = tl.load(w_ptrs + step * 64)
            x_MK = tl.load(x_ptrs + step * 128)
        else:
            w_words = tl.load(w_ptrs + step * 64, mask=(step * 64 + tl.arange(0, 64) < words)[None, :], other=0)
            x_MK = tl.load(x_ptrs + step * 128, mask=(step * 128 + tl.arange(0, 128) < num_cols)[None, :], other=0.0)
        low, high = unpack_e4m3(w_words, USE_ASM)
        w_NK = tl.join(low, high).reshape(BLOCK_N, 128)
        if INTERPRET:  # the interpreter multiplies the raw bits of bf16 operands
            part_NM = tl.dot(w_NK.to(tl.float32), tl.trans(x_MK.to(tl.float32)), input_precision="ieee")
        else:
            part_NM = tl.dot(w_NK, tl.trans(x_MK))
        acc_NM += part_NM * tl.load(scale_ptr + step)
    if HAS_BIAS:
        acc_NM += tl.load(bias_ptr + row_N, mask=row_N < num_out, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + token_M.to(tl.int64)[:, None] * num_out + row_N[None, :]
    is_out_MN = (token_M < num_tokens)[:, None] & (row_N < num_out)[None, :]
    tl.store(out_ptrs, tl.trans(acc_NM).to(out_ptr.dtype.element_ty), mask=is_out_MN)


class Fp8Linear:
    """A linear layer as a function of its bf16 input [T, K]; the weights are kept as they are."""

    __slots__ = ("_bias_N", "_num_processors", "_use_asm", "_weight")

    def __init__(self, weight_NK: Fp8BlockWeight, bias_N: torch.Tensor | None) -> None:
        """`weight_NK` is contiguous, on the device where it will be multiplied."""
        self._weight = Fp8BlockWeight(weight_NK.data.contiguous(), weight_NK.scale_inv.contiguous())
        self._bias_N = bias_N
        self._num_processors = num_processors(weight_NK.device, _FEW_PROGRAMS)
        self._use_asm = weight_NK.device.type == "cuda" and torch.version.hip is None

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, N] in the dtype of `x`, whose rows may be further apart than K."""
        (num_outputs, num_cols), num_tokens = self._weight.shape, x_TK.shape[0]
        out_TN = torch.empty((num_tokens, num_outputs), dtype=x_TK.dtype, device=x_TK.device)
        if out_TN.numel() == 0:
            return out_TN
        if x_TK.stride(1) != 1:
            x_TK = x_TK.contiguous()
        plan = choose_plan(num_tokens, num_outputs, self._num_processors)
        grid = (triton.cdiv(num_tokens, plan.block_m) * triton.cdiv(num_outputs, plan.block_n),)
        launch(fp8_block_gemm, grid)(
            x_TK, self._weight.data.view(torch.int16), self._weight.scale_inv,
            x_TK if self._bias_N is None else self._bias_N, out_TN, num_tokens, num_outputs, num_cols, x_TK.stride(0),
            BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, GROUP=_GROUP_TILES, HAS_BIAS=self._bias_N is not None,
            EVEN_K=num_cols % BLOCK == 0, USE_ASM=self._use_asm, INTERPRET=bool(triton.knobs.runtime.interpret),
            num_warps=plan.num_warps, num_stages=plan.num_stages,
        )  # fmt: skip
        return out_TN
