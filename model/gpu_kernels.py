"""Small fused kernels of the forward pass on GPUs. Each replaces several torch operators and rounds at the same places.

Import it only where Triton is installed (`fused_kernels`). Shape letters: T tokens, H hidden, U rows of the vocabulary.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe.kernels.compile_ahead import launch
from moe.kernels.pdl import pdl_options

_WIDE_ROW = 2048  # rows at least this long get eight warps
_EMBED_BLOCK = 1024


@triton.jit
def _add_rms_norm(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, x_stride, delta_stride, eps,
    H: tl.constexpr, H_PAD: tl.constexpr, HAS_DELTA: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (T,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, H_PAD)
    is_column = columns < H
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * x_stride + columns, mask=is_column, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * delta_stride + columns, mask=is_column, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * H + columns, x, mask=is_column)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(out_ptr + row * H + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=is_column)


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` in the dtype of `x`; fp32 inside."""
    out_TH = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    _launch(x_TH, None, weight_H, x_TH, out_TH, eps)
    return out_TH


def add_rms_norm(
    x_TH: torch.Tensor, delta_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + delta`, and its `rms_norm`."""
    sum_TH, out_TH = (torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device) for _ in "ab")
    _launch(x_TH, delta_TH, weight_H, sum_TH, out_TH, eps)
    return sum_TH, out_TH


def _launch(
    x_TH: torch.Tensor, delta_TH: torch.Tensor | None, weight_H: torch.Tensor, sum_TH: torch.Tensor,
    out_TH: torch.Tensor, eps: float,
) -> None:  # fmt: skip
    num_tokens, hidden = x_TH.shape
    if num_tokens:
        launch(_add_rms_norm, (num_tokens,))(
            x_TH, x_TH if delta_TH is None else delta_TH, weight_H, sum_TH, out_TH,
            x_TH.stride(0), x_TH.stride(0) if delta_TH is None else delta_TH.stride(0), eps,
            H=hidden, H_PAD=triton.next_power_of_2(hidden), HAS_DELTA=delta_TH is not None,
            num_warps=8 if hidden > _WIDE_ROW else 4, **pdl_options(x_TH.device),
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _embed(
    ids_ptr, weight_ptr, out_ptr, first_row, num_rows,
    H: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (T, blocks of H)."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(ids_ptr + token) - first_row
    is_own = (row >= 0) & (row < num_rows)
    x = tl.load(weight_ptr + row * H + columns, mask=is_own & (columns < H), other=0.0)
    tl.store(out_ptr + token.to(tl.int64) * H + columns, x, mask=columns < H)


def embed(ids_T: torch.Tensor, weight_UH: torch.Tensor, first_row: int, out_TH: torch.Tensor) -> None:
    """Rows of `weight` by token id, int64, into `out`; it has those from `first_row` on, and others are zero."""
    (num_rows, hidden), num_tokens = weight_UH.shape, ids_T.shape[0]
    if num_tokens:
        launch(_embed, (num_tokens, triton.cdiv(hidden, _EMBED_BLOCK)))(
            ids_T, weight_UH, out_TH, first_row, num_rows, H=hidden, BLOCK=_EMBED_BLOCK,
            **pdl_options(ids_T.device),
        )  # fmt: skip
