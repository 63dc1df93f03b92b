"""Linear layers for up to 16 rows in bf16 on a GPU: the time is that of reading the weights once.

A small batch needs many programs to keep the memory busy, so each takes a block of outputs and a share of the inputs;
the last program of a block to arrive adds the shares up, in their order, so a result's bits depend on nothing else.

Shape letters: R rows, N outputs, K inputs, S shares of the inputs.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe.device import num_processors
from moe.kernels.arrivals import MAX_COUNTERS, counters, is_last_to_arrive
from moe.kernels.compile_ahead import launch
from moe.kernels.pdl import pdl_options

MAX_ROWS = 16
MANY_OUTPUTS = 1 << 15  # from here on there are blocks enough for all processors


@dataclass(frozen=True, slots=True)
class _Tile:
    """Outputs and inputs that a program multiplies at a time."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# Among the fastest of searches on an H200 with GPT-OSS-20B's projections, and with the heads of it and of DeepSeek-V3.
_TILE, _WIDE_TILE = _Tile(32, 64, 2, 6), _Tile(64, 128, 4, 4)
_PROGRAMS_PER_PROCESSOR = 4
_MAX_SHARES = 8
_FEW_PROCESSORS = 4  # where an interpreter runs the kernel


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_linear(
    x_ptr, weight_ptr, bias_ptr, out_ptr, parts_ptr, arrived_ptr, num_rows, num_outputs, x_stride,
    K: tl.constexpr, SHARES: tl.constexpr, MAX_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, USE_PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """out [R, N] = x [R, K] @ weight [N, K].T + bias. Grid: (N / BLOCK_N, S)."""
    block = tl.program_id(0)
    share = tl.program_id(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, MAX_R)
    k = tl.arange(0, BLOCK_K)
    is_output_N, is_row_R = n < num_outputs, r < num_rows
    STEPS: tl.constexpr = (K + BLOCK_K * SHARES - 1) // (BLOCK_K * SHARES)
    first = share * STEPS * BLOCK_K
    weight_ptrs = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    x_ptrs = x_ptr + r[None, :] * x_stride + k[:, None]
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    total_NR = tl.zeros((BLOCK_N, MAX_R), tl.float32)
    for step in tl.range(0, STEPS, num_stages=NUM_STAGES):
        start = first + step * BLOCK_K
        is_input_K = k < K - start
        w_NK = tl.load(weight_ptrs + start, mask=is_output_N[:, None] & is_input_K[None, :], other=0.0)
        x_KR = tl.load(x_ptrs + start, mask=is_input_K[:, None] & is_row_R[None, :], other=0.0)
        if INTERPRET:  # the interpreter multiplies bf16 wrongly
            w_NK, x_KR = w_NK.to(tl.float32), x_KR.to(tl.float32)
        total_NR = tl.dot(w_NK, x_KR, total_NR)
    is_done = True
    if SHARES > 1:
        place = block.to(tl.int64) * (SHARES * BLOCK_N * MAX_R)
        part_ptrs = parts_ptr + place + tl.arange(0, BLOCK_N)[:, None] * MAX_R + r[None, :]
        tl.store(part_ptrs + share * (BLOCK_N * MAX_R), total_NR, mask=is_row_R[None, :])
        is_done = is_last_to_arrive(arrived_ptr + block, SHARES)
        if is_done:
            total_NR = tl.zeros((BLOCK_N, MAX_R), tl.float32)
            for other in tl.static_range(SHARES):
                total_NR += tl.load(
                    part_ptrs + other * (BLOCK_N * MAX_R), mask=is_row_R[None, :], other=0.0, cache_modifier=".cg"
                )
    if is_done:
        if HAS_BIAS:
            total_NR += tl.load(bias_ptr + n, mask=is_output_N, other=0.0).to(tl.float32)[:, None]
        out_ptrs = out_ptr + r.to(tl.int64)[None, :] * num_outputs + n[:, None]
        tl.store(out_ptrs, total_NR.to(out_ptr.dtype.element_ty), mask=is_output_N[:, None] & is_row_R[None, :])


def _tile(num_outputs: int) -> _Tile:
    return _TILE if num_outputs < MANY_OUTPUTS else _WIDE_TILE


@functools.cache
def num_shares(num_outputs: int, num_inputs: int, processors: int) -> int:
    """Shares of the inputs, so that all processors have about the same number of programs."""
    tile = _tile(num_outputs)
    blocks, steps = -(-num_outputs // tile.block_n), -(-num_inputs // tile.block_k)
    if blocks > MAX_COUNTERS:
        return 1
    wanted = max(1, round(_PROGRAMS_PER_PROCESSOR * processors / blocks))
    steps_each = -(-steps // min(wanted, _MAX_SHARES, steps))
    return -(-steps // steps_each)


def linear(
    x_RK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, out_RN: torch.Tensor | None = None
) -> torch.Tensor:
    """[R, K] to [R, N] in bf16, with fp32 sums; at most `MAX_ROWS` rows, whose numbers lie side by side.

    `out_RN`: memory for the result, row-major, in bf16 or fp32; None for new memory.
    """
    (num_rows, num_inputs), num_outputs = x_RK.shape, weight_NK.shape[0]
    device = x_RK.device
    if out_RN is None:
        out_RN = torch.empty(num_rows, num_outputs, dtype=x_RK.dtype, device=device)
    if not num_rows or not num_outputs:
        return out_RN
    tile = _tile(num_outputs)
    blocks = triton.cdiv(num_outputs, tile.block_n)
    shares = num_shares(num_outputs, num_inputs, num_processors(device, _FEW_PROCESSORS))
    size = blocks * shares * tile.block_n * MAX_ROWS if shares > 1 else 0
    parts = torch.empty(size, dtype=torch.float32, device=device)
    launch(few_rows_linear, (blocks, shares))(
        x_RK, weight_NK, out_RN if bias_N is None else bias_N, out_RN, parts, counters(device, "few rows"),
        num_rows, num_outputs, x_RK.stride(0),
        K=num_inputs, SHARES=shares, MAX_R=MAX_ROWS, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        NUM_STAGES=tile.num_stages, HAS_BIAS=bias_N is not None, INTERPRET=bool(triton.knobs.runtime.interpret),
        num_warps=tile.num_warps,
        **pdl_options(device),
    )  # fmt: skip
    return out_RN
