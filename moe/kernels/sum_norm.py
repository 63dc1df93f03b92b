"""One kernel for "add up the ranks' parts, add that to the residual stream, RMS norm", over memory that all GPUs read.

Each program has one row. It tells the other ranks that this rank's part is there, waits until they have said the same,
reads the row of all parts, in rank order so that all ranks get the same bits, and goes on. It does not wait until the
others have read: who writes parts must know that (`moe.one_shot.OneShotGroup`).

Import it only where Triton is installed. Shape letters: T tokens, H hidden, R ranks.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe.kernels.compile_ahead import compile_only, launch
from moe.kernels.flags import flags_of, tell_others, wait_for_others
from moe.kernels.pdl import pdl_options

_WIDE_ROWS = ((4096, 16), (2048, 8), (0, 4))  # rows longer than this get so many warps


@triton.jit(do_not_specialize=["rank"])
def sum_add_rms_norm(
    parts_ptr, flags_ptr, x_ptr, weight_ptr, sum_ptr, out_ptr, rank, x_stride, eps,
    H: tl.constexpr, H_PAD: tl.constexpr, RANKS: tl.constexpr, MAX_RANKS: tl.constexpr, HAS_X: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (T,). parts, flags: addresses of each rank's part [T, H] and flags [T, MAX_RANKS], int64 [RANKS].

    Without HAS_X the sum of the parts is all that is normed.
    """
    row = tl.program_id(0)
    columns = tl.arange(0, H_PAD)
    is_column = columns < H
    ranks = tl.arange(0, MAX_RANKS)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    parts_R = tl.load(parts_ptr + ranks, mask=ranks < RANKS, other=0)
    set_by_this, set_by_others = flags_of(flags_ptr, row, rank, RANKS, MAX_RANKS)
    if USE_PDL:
        gdc_wait()  # the part is written, and all earlier kernels of this rank have read what they read
        gdc_launch_dependents()
    tell_others(set_by_this, rank, RANKS, MAX_RANKS)
    if HAS_X:
        x = tl.load(x_ptr + row * x_stride + columns, mask=is_column, other=0.0)
    wait_for_others(set_by_others, RANKS, MAX_RANKS)
    total = tl.zeros((H_PAD,), tl.float32)
    for other in tl.static_range(RANKS):
        address = tl.sum(tl.where(ranks == other, parts_R, 0), 0)
        part_ptr = tl.multiple_of(address.to(tl.pointer_type(sum_ptr.dtype.element_ty)), 16)
        # The same addresses had other numbers two sums ago, so no line of the L1 will do.
        part = tl.load(part_ptr + row * H + columns, mask=is_column, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    total = total.to(sum_ptr.dtype.element_ty)
    if HAS_X:
        total = (x.to(tl.float32) + total.to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + row * H + columns, total, mask=is_column)
    x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(out_ptr + row * H + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=is_column)


class SumNorm:
    """The kernel for one place of parts, which every rank has."""

    def __init__(self, parts: list[int], flags: list[int], rank: int, max_ranks: int, device: torch.device) -> None:
        """`parts`, `flags`: where each rank's lie, as this rank addresses them; 16-byte aligned. Flags are clear.

        `max_ranks`: flags of a row, a power of two.
        """
        self._parts_R, self._flags_R = (torch.tensor(each, dtype=torch.int64, device=device) for each in (parts, flags))
        self._rank, self._num_ranks, self._max_ranks = rank, len(parts), max_ranks

    def __call__(
        self, x_TH: torch.Tensor | None, part_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x`, if there is one, plus the sum of the parts, and its RMS norm.

        `part_TH` has the shape and dtype of the parts; it is not read. All ranks call it, with the same T > 0.
        """
        return self._on_kernel(launch(sum_add_rms_norm, (part_TH.shape[0],)), x_TH, part_TH, weight_H, eps)

    def compile(self, x_TH: torch.Tensor | None, part_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> None:
        """For such tensors; launches nothing."""
        self._on_kernel(compile_only(sum_add_rms_norm), x_TH, part_TH, weight_H, eps)

    def _on_kernel(self, call, x_TH, part_TH, weight_H, eps) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, device = part_TH.shape[1], part_TH.device
        sum_TH, out_TH = (torch.empty(part_TH.shape, dtype=part_TH.dtype, device=device) for _ in "ab")
        x_stride = 0 if x_TH is None else x_TH.stride(0)
        call(
            self._parts_R, self._flags_R, sum_TH if x_TH is None else x_TH, weight_H, sum_TH, out_TH, self._rank,
            x_stride, eps,
            H=hidden, H_PAD=triton.next_power_of_2(hidden), RANKS=self._num_ranks, MAX_RANKS=self._max_ranks,
            HAS_X=x_TH is not None, num_warps=next(warps for length, warps in _WIDE_ROWS if hidden > length),
            **pdl_options(device),
        )  # fmt: skip
        return sum_TH, out_TH
