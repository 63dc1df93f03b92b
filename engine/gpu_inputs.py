"""The Triton kernel of `engine.decode_inputs`: it spreads a decode step's numbers over the buffers of its graph.

Among the ranks of a group the first one, which samples, sends each token that the host did not know yet to the others:
it stores the token plus 1 in a box of each of them, which that rank empties. The first rank fills a box again in the
next step, and every step has a sum over the ranks after this kernel, so the box is empty by then.

Import it only where Triton is installed. Shape letters as in `engine.decode_inputs`; R ranks.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from engine.decode_inputs import HEADER, NUMBERS_OF_ROW
from engine.step_buffers import StepBuffers
from moe.group import TokenMail
from moe.kernels.compile_ahead import launch

_HEADER = tl.constexpr(HEADER)
_NUMBERS_OF_ROW = tl.constexpr(NUMBERS_OF_ROW)
_MOST_PAGES_AT_ONCE = 1024


@triton.jit
def _exchange(token, boxes_ptr, row, rank, RANKS: tl.constexpr):
    """The first rank's `token`, on all ranks."""
    if rank == 0:
        for other in tl.static_range(1, RANKS):
            box_ptr = tl.load(boxes_ptr + other).to(tl.pointer_type(tl.int32)) + row
            tl.atomic_xchg(box_ptr, token + 1, sem="release", scope="sys")
    else:
        box_ptr = tl.load(boxes_ptr + rank).to(tl.pointer_type(tl.int32)) + row
        found = tl.atomic_xchg(box_ptr, 0, sem="acquire", scope="sys")
        while found == 0:
            found = tl.atomic_xchg(box_ptr, 0, sem="acquire", scope="sys")
        token = found - 1
    return token


@triton.jit(do_not_specialize=["spare_slot", "max_rows", "table_width", "rank"])
def spread_numbers(
    numbers_ptr, tokens_ptr, boxes_ptr, ids_ptr, positions_ptr, lens_ptr, slots_ptr, tables_ptr, num_live_ptr,
    spare_slot, max_rows, table_width, rank,
    PAGE_SIZE: tl.constexpr, KINDS: tl.constexpr, RANKS: tl.constexpr, COUNTS_LIVE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Grid: (N,). boxes: addresses of each rank's boxes, int64 [RANKS]. slots [KINDS, max_rows]; tables, rows of
    `table_width` pages.
    """
    row = tl.program_id(0)
    num_rows, num_pages = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
    if COUNTS_LIVE & (row == 0):
        tl.store(num_live_ptr, num_rows)
    if row < num_rows:
        row_ptr = numbers_ptr + _HEADER + row
        token, length = tl.load(row_ptr), tl.load(row_ptr + num_rows)
        place = tl.load(row_ptr + 2 * num_rows)
        if place >= 0:
            token = tl.load(tokens_ptr + place).to(tl.int32)
            if RANKS > 1:
                token = _exchange(token, boxes_ptr, row, rank, RANKS)
        position = length - 1
        tl.store(ids_ptr + row, token.to(tl.int64))
        tl.store(positions_ptr + row, position.to(tl.int64))
        tl.store(lens_ptr + row, length)
        for kind in tl.static_range(KINDS):
            pages_ptr = numbers_ptr + _HEADER + _NUMBERS_OF_ROW * num_rows + (kind * num_rows + row) * num_pages
            table_ptr = tables_ptr + (kind * max_rows + row).to(tl.int64) * table_width
            for start in range(0, num_pages, AT_ONCE):
                columns = start + tl.arange(0, AT_ONCE)
                pages = tl.load(pages_ptr + columns, mask=columns < num_pages, other=0)
                tl.store(table_ptr + columns, pages, mask=columns < num_pages)
            page = tl.load(pages_ptr + position // PAGE_SIZE).to(tl.int64)
            tl.store(slots_ptr + kind * max_rows + row, page * PAGE_SIZE + position % PAGE_SIZE)
    else:
        tl.store(lens_ptr + row, 1)
        for kind in tl.static_range(KINDS):
            tl.store(slots_ptr + kind * max_rows + row, spare_slot.to(tl.int64))


def spreader(
    numbers: torch.Tensor, tokens_M: torch.Tensor, buffers: StepBuffers, mail: TokenMail | None
) -> Callable[[int], None]:
    """The kernel for these tensors, as a function of N."""
    num_kinds, max_rows, table_width = buffers.tables_GMP.shape
    device = numbers.device
    boxes_R = torch.tensor([0] if mail is None else mail.addresses, dtype=torch.int64, device=device)
    at_once = min(_MOST_PAGES_AT_ONCE, triton.next_power_of_2(table_width))

    def spread(num_rows: int) -> None:
        launch(spread_numbers, (num_rows,))(
            numbers, tokens_M, boxes_R, buffers.ids_M, buffers.positions_M, buffers.lens_M, buffers.slots_GM,
            buffers.tables_GMP, numbers if buffers.num_live is None else buffers.num_live,
            buffers.spare_slot, max_rows, table_width, 0 if mail is None else mail.rank,
            PAGE_SIZE=buffers.page_size, KINDS=num_kinds, RANKS=1 if mail is None else len(mail.addresses),
            COUNTS_LIVE=buffers.num_live is not None, AT_ONCE=at_once, num_warps=1 if at_once <= 128 else 4,
        )  # fmt: skip

    return spread
