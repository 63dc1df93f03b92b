"""FP8 linear layers on GPUs: weights stay in FP8 blocks, packed as expert weights are; activations are bf16.

A decode step reads every weight once and does little else, so half the bytes are half the time. Codes become bf16 in
registers, exactly, with instructions that every GPU since the A100 has; sums are fp32, and the scale of a block
multiplies the sum over its 128 columns. Nothing is rounded but the output. A few tokens need many programs to keep the
memory busy, so each takes a share of the inputs, and the last one of a tile to arrive adds the shares up, in their
order, so a result's bits depend on nothing else.

Import it only where Triton is installed. Shape letters: T tokens, K inputs, N outputs, M token rows of a tile.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe.device import num_processors
from moe.formats import Fp8BlockWeight
from moe.formats.fp8_block import BLOCK
from moe.kernels.arrivals import MAX_COUNTERS, counters, is_last_to_arrive, parts_at_once, sum_parts
from moe.kernels.compile_ahead import launch
from moe.kernels.gemm import activate, prefetch_weights
from moe.kernels.layout import PAIR, ROWS, pack_matrix
from moe.kernels.pdl import pdl_options
from moe.kernels.products import FP8_BLOCK, multiply_fp8

_GROUP_TILES = 8  # token tiles that share weights in the L2, where there are many
_FEW_PROCESSORS = 4  # where an interpreter runs the kernel
_MAX_SHARES = 16
_WORDS = tl.constexpr(BLOCK // 2)  # 16-bit words of two codes, of a row in a step


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """Rows of weights and of tokens in a tile, how the compiler pipelines it, and shares of the inputs.

    `per_processor`: programs that `choose_plan` divides the inputs for, on each processor.
    """

    block_n: int
    block_m: int
    num_warps: int
    num_stages: int
    per_processor: int = 1
    shares: int = 1

    @property
    def height(self) -> int:
        """Rows of weights that are multiplied at a time, one or two times a step: 16 for each warp.

        Of fewer rows, several warps would unpack the same.
        """
        return min(self.block_n, 16 * self.num_warps)

    @property
    def parts_at_once(self) -> int:
        """Parts of a sum that are loaded at once."""
        return parts_at_once(_MAX_SHARES, self.height * self.block_m, self.num_warps)


# Searched on an H200 by `benchmarks/sweep_fp8_rows.py` for 1, 4, 16 and 64 rows; 32 and 128 stand between and beyond.
PLANS = (
    LinearPlan(64, 8, 4, 4, per_processor=2),
    LinearPlan(64, 16, 4, 4, per_processor=2),
    LinearPlan(64, 32, 4, 4, per_processor=2),
    LinearPlan(64, 64, 4, 4, per_processor=2),
    LinearPlan(128, 128, 8, 3),
)


@functools.lru_cache(maxsize=1024)
def choose_plan(num_tokens: int, num_outputs: int, num_inputs: int, processors: int) -> LinearPlan:
    """The plan with the lowest tiles that hold all tokens, else the tallest; its shares fill the processors."""
    plan = next((plan for plan in PLANS if num_tokens <= plan.block_m), PLANS[-1])
    return with_shares(plan, num_tokens, num_outputs, num_inputs, processors)


def with_shares(
    plan: LinearPlan, num_tokens: int, num_outputs: int, num_inputs: int, processors: int
) -> LinearPlan:  # fmt: skip
    """The plan with as many shares as give each processor the programs that it wants."""
    tiles = triton.cdiv(num_outputs, plan.block_n) * triton.cdiv(num_tokens, plan.block_m)
    steps = triton.cdiv(num_inputs, BLOCK)
    wanted = max(1, plan.per_processor * processors // tiles)
    if wanted == 1 or tiles > MAX_COUNTERS:
        return replace(plan, shares=1)
    steps_each = triton.cdiv(steps, min(wanted, _MAX_SHARES, steps))
    return replace(plan, shares=triton.cdiv(steps, steps_each))


@triton.jit
def _store_outputs(
    acc_NM, bias_ptr, out_ptr, first_row, token_M, is_token_M, num_outputs,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Outputs of the weight rows from `first_row` on. IS_GATED: rows alternate, 8 of gate and 8 of up."""
    row_N = first_row + tl.arange(0, ROWS)
    if HAS_BIAS:
        acc_NM += tl.load(bias_ptr + row_N, mask=row_N < num_outputs, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        gate, up = tl.split(acc_NM.reshape(ROWS // 16, 2, 8, BLOCK_M).permute(0, 2, 3, 1))
        acc_NM = activate(gate, up, 1.0, 0.0, 0.0, False).reshape(ROWS // 2, BLOCK_M)
        row_N = first_row // 2 + tl.arange(0, ROWS // 2)
    out_ptrs = out_ptr + token_M.to(tl.int64)[None, :] * num_outputs + row_N[:, None]
    mask_NM = (row_N < num_outputs)[:, None] & is_token_M[None, :]
    tl.store(out_ptrs, acc_NM.to(out_ptr.dtype.element_ty), mask=mask_NM)


@triton.jit(do_not_specialize=["num_tokens", "num_shares", "num_blocks", "num_steps"])
def fp8_block_gemm(
    x_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, parts_ptr, arrived_ptr,
    num_tokens, num_shares, num_outputs, num_cols, x_stride, num_blocks, num_steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEIGHT: tl.constexpr, IS_SPLIT: tl.constexpr, GROUP: tl.constexpr,
    NUM_STAGES: tl.constexpr, AT_ONCE: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    SHORT_K: tl.constexpr, USE_ASM: tl.constexpr, USE_PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """`out[T, N] = x[T, K] @ w[N, K].T + bias`, or `silu(gate) * up` of it; weights and scales as `layout.py` has them.

    Grid: (tiles of tokens x tiles of weights, shares); GROUP tiles of tokens at a time walk along the weights together.
    parts: fp32 [tiles, shares, BLOCK_N, BLOCK_M].
    """
    num_m, num_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(num_blocks * 64, BLOCK_N)
    tile, share = tl.program_id(0), tl.program_id(1)
    group, within = tile // (GROUP * num_n), tile % (GROUP * num_n)
    height = tl.minimum(num_m - group * GROUP, GROUP)
    block = within // height
    token_M = (group * GROUP + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token_M = token_M < num_tokens
    if USE_PDL:  # weights never change, so they are fetched while the kernel before still runs
        prefetch_weights(
            w_ptr, share * 0, block, share, num_shares, num_blocks, num_steps, BLOCK_N, 64 * _WORDS, NUM_STAGES
        )
        gdc_wait()
        gdc_launch_dependents()
    PARTS: tl.constexpr = BLOCK_N // HEIGHT
    x_ptr_M = x_ptr + tl.where(is_token_M, token_M, 0).to(tl.int64) * x_stride
    acc_0, acc_1 = multiply_fp8(
        x_ptr_M, scale_ptr, 0, is_token_M, w_ptr, scale_ptr, share * 0, block * BLOCK_N,
        num_steps * share // num_shares, num_steps * (share + 1) // num_shares, num_blocks, num_steps, num_cols,
        FP8_BLOCK, BLOCK_M, HEIGHT, PARTS, 128, _WORDS, NUM_STAGES, SHORT_K, USE_ASM, INTERPRET,
    )  # fmt: skip
    is_done = True
    if IS_SPLIT:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        part_ptrs = parts_ptr + tile.to(tl.int64) * num_shares * SIZE
        part_ptrs = part_ptrs + tl.arange(0, HEIGHT)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(part_ptrs + share * SIZE, acc_0, mask=is_token_M[None, :])
        if PARTS == 2:
            tl.store(part_ptrs + share * SIZE + SIZE // 2, acc_1, mask=is_token_M[None, :])
        is_done = is_last_to_arrive(arrived_ptr + tile, num_shares)
        if is_done:
            acc_0 = sum_parts(part_ptrs, is_token_M[None, :], num_shares, SIZE, AT_ONCE)
            if PARTS == 2:
                acc_1 = sum_parts(part_ptrs + SIZE // 2, is_token_M[None, :], num_shares, SIZE, AT_ONCE)
    if is_done:
        first_row = block * BLOCK_N
        _store_outputs(
            acc_0, bias_ptr, out_ptr, first_row, token_M, is_token_M, num_outputs, HEIGHT, BLOCK_M, IS_GATED, HAS_BIAS
        )
        if PARTS == 2:
            _store_outputs(
                acc_1, bias_ptr, out_ptr, first_row + HEIGHT, token_M, is_token_M, num_outputs,
                HEIGHT, BLOCK_M, IS_GATED, HAS_BIAS,
            )  # fmt: skip


def can_gate(weight_NK: Fp8BlockWeight) -> bool:
    """Whether rows [gate; up] can alternate in eights, each with one scale."""
    return weight_NK.shape[0] % (2 * PAIR) == 0


class Fp8Linear:
    """A linear layer as a function of its bf16 input [T, K]; packs the weight once.

    `is_gated`: the weight is [gate; up], and the output is `silu(gate) * up`, [T, N/2].
    """

    __slots__ = ("_arrived", "_bias_N", "_data", "_is_gated", "_num_cols", "_num_outputs", "_processors", "_scales")

    def __init__(self, weight_NK: Fp8BlockWeight, bias_N: torch.Tensor | None, *, is_gated: bool = False) -> None:
        """`weight_NK` is on the device where it will be multiplied; `is_gated` needs `can_gate` and no bias."""
        stack = Fp8BlockWeight(weight_NK.data[None], weight_NK.scale_inv[None])
        packed = pack_matrix(stack, None, is_gated=is_gated)
        self._data, self._scales = packed.data, packed.scales
        self._arrived = counters(weight_NK.device, "fp8 linear")  # made before any step is captured
        self._bias_N = bias_N
        self._is_gated = is_gated
        self._num_cols = packed.num_cols
        self._num_outputs = packed.num_rows // (2 if is_gated else 1)
        self._processors = num_processors(weight_NK.device, _FEW_PROCESSORS)

    def __call__(
        self, x_TK: torch.Tensor, plan: LinearPlan | None = None, out_TN: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, N] in the dtype of `x`, whose rows may be further apart than K.

        `plan`: another than the chosen one; it has no more shares than there are blocks of 128 inputs.
        `out_TN`: memory for the result, row-major; None for new memory.
        """
        num_tokens, device = x_TK.shape[0], x_TK.device
        if out_TN is None:
            out_TN = torch.empty((num_tokens, self._num_outputs), dtype=x_TK.dtype, device=device)
        if out_TN.numel() == 0:
            return out_TN
        if self._num_cols == 0:
            return out_TN.zero_() if self._bias_N is None else out_TN.copy_(self._bias_N.expand_as(out_TN))
        if x_TK.stride(1) != 1:
            x_TK = x_TK.contiguous()
        num_steps, num_blocks = self._data.shape[1:3]
        plan = plan or choose_plan(num_tokens, num_blocks * ROWS, self._num_cols, self._processors)
        tiles = triton.cdiv(num_tokens, plan.block_m) * triton.cdiv(num_blocks * ROWS, plan.block_n)
        size = tiles * plan.shares * plan.block_n * plan.block_m if plan.shares > 1 else 0
        parts = torch.empty(size, dtype=torch.float32, device=device)
        launch(fp8_block_gemm, (tiles, plan.shares))(
            x_TK, self._data, self._scales, x_TK if self._bias_N is None else self._bias_N, out_TN,
            parts, self._arrived,
            num_tokens, plan.shares, self._num_outputs, self._num_cols, x_TK.stride(0), num_blocks, num_steps,
            BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, HEIGHT=plan.height, IS_SPLIT=plan.shares > 1,
            GROUP=_GROUP_TILES, NUM_STAGES=plan.num_stages, AT_ONCE=plan.parts_at_once, IS_GATED=self._is_gated,
            HAS_BIAS=self._bias_N is not None, SHORT_K=self._num_cols < BLOCK,
            USE_ASM=device.type == "cuda" and torch.version.hip is None,
            INTERPRET=bool(triton.knobs.runtime.interpret), num_warps=plan.num_warps, **pdl_options(device),
        )  # fmt: skip
        return out_TN
