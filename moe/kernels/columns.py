"""One kernel that puts the columns of all ranks side by side, over memory that all GPUs can write.

Each program has a block of one row's columns. It writes them to the other ranks, tells them so, waits until they have
said the same, and copies what they wrote to where the whole row is wanted. A rank may write to another one's memory
again after another collective of both: the other has taken part in that when its kernels before have read everything.

Each block of a row is a meeting of `moe.kernels.flags`. A program writes and tells before it waits, and GPUs start
programs in their order, so more of them than fit a GPU do not wait for each other.

Import it only where Triton is installed. Shape letters: T rows, U columns of a rank, V of all, R ranks.
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

_NUM_WARPS = 4


@triton.jit(do_not_specialize=["rank"])
def gather_columns(
    own_ptr, out_ptr, memories_ptr, flags_ptr, rank, own_stride, out_stride, num_own, width, num_columns,
    RANKS: tl.constexpr, MAX_RANKS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of `width`, T). memories, flags: addresses of each rank's, int64 [R]. In a rank's memory,
    [T, R, width], are the columns that rank r has written at [:, r].
    """
    row = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ranks = tl.arange(0, MAX_RANKS)
    memories_R = tl.load(memories_ptr + ranks, mask=ranks < RANKS, other=0)
    meeting = row * tl.num_programs(0) + tl.program_id(0)
    set_by_this, set_by_others = flags_of(flags_ptr, meeting, rank, RANKS, MAX_RANKS)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    own = tl.load(own_ptr + row.to(tl.int64) * own_stride + columns, mask=columns < num_own, other=0.0)
    first = (row * RANKS).to(tl.int64) * width
    for other in tl.static_range(RANKS):
        if other != rank:
            address = tl.sum(tl.where(ranks == other, memories_R, 0), 0)
            memory_ptr = tl.multiple_of(address.to(tl.pointer_type(own_ptr.dtype.element_ty)), 16)
            tl.store(memory_ptr + first + rank * width + columns, own, mask=columns < num_own)
    tl.debug_barrier()  # all threads have written; the flags then release that to the other GPUs
    tell_others(set_by_this, rank, RANKS, MAX_RANKS)
    out_row_ptr = out_ptr + row.to(tl.int64) * out_stride
    tl.store(out_row_ptr + rank * width + columns, own, mask=columns < num_own)
    wait_for_others(set_by_others, RANKS, MAX_RANKS)
    this_address = tl.load(memories_ptr + rank)
    this_memory_ptr = tl.multiple_of(this_address.to(tl.pointer_type(own_ptr.dtype.element_ty)), 16)
    for other in tl.static_range(RANKS):
        if other != rank:
            mask = (columns < width) & (columns < num_columns - other * width)
            # The same addresses had other numbers in the step before, so no line of the L1 will do.
            part = tl.load(
                this_memory_ptr + first + other * width + columns, mask=mask, other=0.0, cache_modifier=".cg"
            )
            tl.store(out_row_ptr + other * width + columns, part, mask=mask)


class GatherColumns:
    """The kernel for memory that every rank has."""

    def __init__(
        self, memories: list[int], flags: list[int], rank: int, max_ranks: int, block: int, device: torch.device
    ) -> None:
        """`memories`, `flags`: where each rank's lie, as this rank addresses them; 16-byte aligned. Flags are clear.

        `max_ranks`: flags of a block, a power of two. `block`: its columns, too.
        """
        both = (torch.tensor(each, dtype=torch.int64, device=device) for each in (memories, flags))
        self._memories_R, self._flags_R = both
        self._rank, self._num_ranks, self._max_ranks, self._block = rank, len(memories), max_ranks, block

    def __call__(self, own_TU: torch.Tensor, out_TV: torch.Tensor, width: int) -> None:
        """`out` gets this rank's columns and those of the others; rank r's begin at r * width.

        Rows are contiguous. All ranks call it, with the same T > 0, V, width and dtype; U is at most the width.
        """
        grid = (triton.cdiv(width, self._block), own_TU.shape[0])
        self._on_kernel(launch(gather_columns, grid), own_TU, out_TV, width)

    def compile(self, own_TU: torch.Tensor, out_TV: torch.Tensor, width: int) -> None:
        """For such tensors; launches nothing."""
        self._on_kernel(compile_only(gather_columns), own_TU, out_TV, width)

    def _on_kernel(self, call, own_TU, out_TV, width) -> None:
        call(
            own_TU, out_TV, self._memories_R, self._flags_R, self._rank, own_TU.stride(0), out_TV.stride(0),
            own_TU.shape[1], width, out_TV.shape[1],
            RANKS=self._num_ranks, MAX_RANKS=self._max_ranks, BLOCK=self._block, num_warps=_NUM_WARPS,
            **pdl_options(own_TU.device),
        )  # fmt: skip
