"""`DecodeInputs`: what captured decode steps read, from numbers that the host sends in one copy.

A kernel, the first of each graph, spreads the numbers over the graph's buffers (`engine.gpu_inputs`). Where it cannot
run, or was wrong when it was checked at start, torch does the same before the replay. The numbers are int32:

    [ B | P | token of each row | its length | its place | page tables, G x B x P ]

The place says where in `tokens_M` the step before left the row's token; -1 if the host knows the token. Positions and
slots follow from lengths and pages.

Shape letters: B rows of the step, N of a graph, M of the largest one, P pages of the longest request, G kinds of layers
that have pages of their own.
"""

import logging
from collections.abc import Callable

import numpy as np
import torch

from engine.step import LATE_ID, StepBatch
from engine.step_buffers import StepBuffers
from engine.transfer import HostBuffers
from model.fused import kernel_module
from moe.group import TokenMail

HEADER = 2  # numbers before the rows'
NUMBERS_OF_ROW = 3
_CHECKED_STEPS = 3

logger = logging.getLogger(__name__)


def count_numbers(*, max_rows: int, num_pages: int, num_kinds: int) -> int:
    """Numbers of a step of so many rows with P pages each, in each of G kinds."""
    return HEADER + max_rows * (NUMBERS_OF_ROW + num_kinds * num_pages)


class DecodeInputs:
    """Fills `buffers`. On the rank that samples for its group, `tokens_M` holds the tokens that steps chose last."""

    def __init__(
        self, buffers: StepBuffers, tokens_M: torch.Tensor, mail: TokenMail | None = None, *, is_in_graph: bool = True
    ) -> None:
        """`mail`: how the group's other ranks can get their tokens; None where somebody copies `tokens_M` to them.

        `is_in_graph`: whether a graph may fill the buffers; False where they are read before it is replayed.
        """
        self._buffers, self._tokens_M, self._mail = buffers, tokens_M, mail
        num_kinds, max_rows, num_pages = buffers.tables_GMP.shape
        num_numbers = count_numbers(max_rows=max_rows, num_pages=num_pages, num_kinds=num_kinds)
        self._numbers = torch.zeros(num_numbers, dtype=torch.int32, device=buffers.ids_M.device)
        self._host = HostBuffers(self._numbers)
        self._num_pages = 1  # of the numbers that were sent last
        self._spread: Callable[[int], None] | None = self._make_kernel() if is_in_graph else None

    def _make_kernel(self) -> Callable[[int], None] | None:
        kernels = kernel_module("engine.gpu_inputs", self._numbers.device)
        if kernels is None:
            return None
        if self._mail is not None and self._buffers.lens_M.shape[0] > self._mail.num_boxes:
            self._mail = None
        kernel: Callable[[int], None] = kernels.spreader(self._numbers, self._tokens_M, self._buffers, self._mail)
        return kernel

    @property
    def delivers_tokens(self) -> bool:
        """Whether tokens reach the other ranks of the group without anybody copying `tokens_M` there."""
        return self._spread is not None and self._mail is not None

    def send(self, step: StepBatch, lens: list[int], tables: list[np.ndarray]) -> None:
        """Take a decode step, after which its requests have `lens` tokens.

        `tables` [places, P of the longest] int32, one for each kind of layers.
        """
        places = [row.row for row in step.rows]
        self._send(step.input_ids, lens, np.where(step.input_ids == LATE_ID, places, -1), tables, places)

    def send_nothing(self) -> None:
        """Take a step without requests."""
        none = np.zeros(0, dtype=np.int32)
        self._send(none, [], none, [], [])

    def _send(
        self, tokens_B: np.ndarray, lens: list[int], places_B: np.ndarray, tables: list[np.ndarray], lines: list[int]
    ) -> None:  # fmt: skip
        """Numbers of B rows, whose pages are in these lines of the tables."""
        num_rows, num_pages = len(lens), -(-max(lens, default=1) // self._buffers.page_size)
        numbers, end = self._host.take(), HEADER + NUMBERS_OF_ROW * num_rows
        numbers[:HEADER] = num_rows, num_pages
        numbers[HEADER:end].reshape(NUMBERS_OF_ROW, num_rows)[:] = tokens_B, lens, places_B
        for table in tables:
            start, end = end, end + num_rows * num_pages
            numbers[start:end].reshape(num_rows, num_pages)[:] = table[:, :num_pages][lines]
        self._host.send(end)
        self._num_pages = num_pages
        self._buffers.num_live_tokens = self._buffers.num_live_rows = num_rows

    def spread(self, num_rows: int) -> None:
        """Fill the first N rows of the buffers by the kernel, as a part of a graph; nothing where torch fills them."""
        if self._spread is not None:
            self._spread(num_rows)

    def spread_by_torch(self, num_rows: int) -> None:
        """Fill the first N rows of the buffers before a replay; nothing where the kernel fills them."""
        if self._spread is None:
            self._copy(num_rows)

    def _copy(self, num_rows: int) -> None:
        """What the kernel does."""
        buffers, num_live, num_pages = self._buffers, self._buffers.num_live_rows, self._num_pages
        end = HEADER + NUMBERS_OF_ROW * num_live
        tokens_B, lens_B, places_B = self._numbers[HEADER:end].view(NUMBERS_OF_ROW, num_live)
        num_kinds = len(buffers.pages)
        tables_GBP = self._numbers[end : end + num_kinds * num_live * num_pages].view(num_kinds, num_live, num_pages)
        last_tokens_B = self._tokens_M[places_B.clamp(min=0).long()]
        positions_B = lens_B.long() - 1
        columns_GB1 = (positions_B // buffers.page_size)[None, :, None].expand(num_kinds, -1, -1)
        pages_GB = tables_GBP.gather(2, columns_GB1)[..., 0].long()
        buffers.ids_M[:num_live] = torch.where(places_B < 0, tokens_B.long(), last_tokens_B)
        buffers.positions_M[:num_live] = positions_B
        buffers.lens_M[:num_live], buffers.lens_M[num_live:num_rows] = lens_B, 1
        buffers.tables_GMP[:, :num_live, :num_pages] = tables_GBP
        buffers.slots_GM[:, :num_live] = pages_GB * buffers.page_size + positions_B % buffers.page_size
        buffers.slots_GM[:, num_live:num_rows] = buffers.spare_slot
        if buffers.num_live is not None:
            buffers.num_live.fill_(num_live)

    def check(self, all_agree: Callable[[bool], bool]) -> None:
        """Compare the kernel with torch on random numbers, and do without it where they differ.

        `all_agree` tells whether something is true on every rank of the engine; all of them call `check` together. The
        kernels of a group exchange tokens, and since `all_agree` waits for all ranks, no kernel begins the next step
        before the others have ended this one.
        """
        if not all_agree(self._runs()):
            self._spread = None
            return
        is_right = True
        for seed in range(_CHECKED_STEPS):
            is_right = all_agree(self._is_right(seed)) and is_right
        self._tokens_M.zero_()
        self._buffers.reset()
        self.send_nothing()
        if not is_right:
            logger.warning("the kernel that fills the inputs of decode steps is wrong: torch fills them, more slowly")
            self._spread = None

    def _runs(self) -> bool:
        """Whether there is a kernel and it can be launched; with no rows it meets no other rank."""
        if self._spread is None:
            return False
        self.send_nothing()
        try:
            self._spread(1)
        except Exception as error:  # of Triton, its compilers or the linker
            logger.warning("the kernel for the inputs of decode steps does not run, so torch fills them: %s", error)
            return False
        return True

    def _is_right(self, seed: int) -> bool:
        """Whether the kernel fills the buffers as torch does, where this rank's own tokens are the group's."""
        buffers, rng = self._buffers, np.random.default_rng(seed)
        num_kinds, max_rows, num_pages = buffers.tables_GMP.shape
        num_rows = max(1, max_rows - seed)
        tokens_M = torch.from_numpy(rng.integers(0, 1000, len(self._tokens_M))).to(self._numbers.device)
        lens = rng.integers(1, buffers.longest + 1, num_rows).tolist()
        places_B = np.where(rng.random(num_rows) < 0.5, -1, rng.permutation(max_rows)[:num_rows])
        tables = list(rng.integers(0, 1000, (num_kinds, num_rows, num_pages)))
        self._send(rng.integers(0, 1000, num_rows), lens, places_B, tables, list(range(num_rows)))
        filled = []
        for fill, knows_tokens in ((self._copy, True), (self.spread, self._mail is None or self._mail.rank == 0)):
            self._tokens_M.copy_(tokens_M if knows_tokens else torch.full_like(tokens_M, -1))
            for poisoned in buffers.all:
                poisoned.fill_(-7)
            fill(max_rows)
            filled.append([tensor.clone() for tensor in buffers.all])
        return all(torch.equal(kernel, copied) for copied, kernel in zip(*filled, strict=True))
