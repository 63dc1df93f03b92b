"""`StepBuffers`: the tensors that captured steps read, at addresses that never change.

Padding writes to a spare page that no request owns, and nobody reads its result.

Shape letters: N tokens or rows of a step, M of the largest one, P pages of the longest request, G kinds of layers that
have pages of their own.
"""

from dataclasses import replace

import torch

from model.batch import ForwardBatch


class PageBuffers:
    """Slots [tokens] and page table [rows, P] of one kind of layer, as graphs read them.

    Tokens without a request write to the spare page. Rows without one keep the pages of the row's last request, which
    are read and never written.
    """

    def __init__(self, slots_M: torch.Tensor, table_MP: torch.Tensor, spare_slot: int) -> None:
        self.slots_M, self.table_MP, self._spare_slot = slots_M, table_MP, spare_slot

    def fill(self, batch: ForwardBatch, num_tokens_before: int) -> None:
        """Take the step's numbers; `num_tokens_before` is how many tokens the step before had."""
        num_tokens, (num_rows, num_pages) = batch.num_tokens, batch.page_table_BP.shape
        self.slots_M[:num_tokens].copy_(batch.slots_T)
        self.table_MP[:num_rows, :num_pages].copy_(batch.page_table_BP)
        if num_tokens < num_tokens_before:  # tokens no longer in use must not write to pages that others own now
            self.slots_M[num_tokens:num_tokens_before] = self._spare_slot

    def clear(self, num_tokens_before: int) -> None:
        """No token writes to a page of a request."""
        self.slots_M[:num_tokens_before] = self._spare_slot


def buffer_bytes(*, max_tokens: int, max_rows: int, num_pages: int, num_kinds: int) -> int:
    """Bytes of `StepBuffers` with P pages and G kinds, but for the one number that `counts_live` adds."""
    bytes_per_token = (2 + num_kinds) * torch.int64.itemsize
    bytes_per_row = (1 + num_kinds * num_pages) * torch.int32.itemsize
    return max_tokens * bytes_per_token + max_rows * bytes_per_row


class StepBuffers:
    """What every captured step reads: ids and positions of tokens, lengths of rows, slots and pages."""

    def __init__(
        self, *, max_tokens: int, max_rows: int, max_model_len: int, page_size: int, spare_page: int,
        is_sliding: bool, counts_live: bool, device: torch.device,
    ) -> None:  # fmt: skip
        """`is_sliding`: sliding layers have pages of their own (`KvLayout.window`). `counts_live`: the model asks how
        many tokens are not padding.
        """
        num_pages = -(-max_model_len // page_size)
        self.page_size, self.longest = page_size, num_pages * page_size
        self.ids_M, self.positions_M = (torch.empty(max_tokens, dtype=torch.int64, device=device) for _ in "ab")
        self.lens_M = torch.empty(max_rows, dtype=torch.int32, device=device)
        self.num_live = torch.empty(1, dtype=torch.int32, device=device) if counts_live else None
        kinds, self.spare_slot = 2 if is_sliding else 1, spare_page * page_size
        self.slots_GM = torch.empty((kinds, max_tokens), dtype=torch.int64, device=device)
        self.tables_GMP = torch.empty((kinds, max_rows, num_pages), dtype=torch.int32, device=device)
        self.pages = [
            PageBuffers(slots_M, table_MP, self.spare_slot)
            for slots_M, table_MP in zip(self.slots_GM, self.tables_GMP, strict=True)
        ]
        self.num_live_tokens = self.num_live_rows = 0  # of the last step
        self.reset()

    @property
    def all(self) -> list[torch.Tensor]:
        """All tensors that a step may change."""
        tensors = [self.ids_M, self.positions_M, self.lens_M, self.slots_GM, self.tables_GMP]
        return tensors if self.num_live is None else [*tensors, self.num_live]

    def reset(self) -> None:
        """As they were made."""
        for zeroed in (self.ids_M, self.positions_M, *([] if self.num_live is None else [self.num_live])):
            zeroed.zero_()
        self.lens_M.fill_(1)
        self.slots_GM.fill_(self.spare_slot)
        self.tables_GMP.fill_(self.spare_slot // self.page_size)

    def fill(self, batch: ForwardBatch) -> None:
        """Take a step's numbers. Rows and tokens after them are as in a step without any request."""
        num_tokens, num_rows = batch.num_tokens, len(batch.query_lens)
        self.ids_M[:num_tokens].copy_(batch.input_ids_T)
        self.positions_M[:num_tokens].copy_(batch.positions_T)
        self.lens_M[:num_rows].copy_(batch.seq_lens_B)
        if self.num_live is not None:
            self.num_live.fill_(num_tokens)
        if num_rows < self.num_live_rows:
            self.lens_M[num_rows : self.num_live_rows] = 1
        for buffers, step in zip(self.pages, (batch, batch.sliding), strict=False):
            if step is not None:
                buffers.fill(step, self.num_live_tokens)
        self.num_live_tokens, self.num_live_rows = num_tokens, num_rows

    def clear(self) -> None:
        """As in a step without any request."""
        if self.num_live is not None:
            self.num_live.fill_(0)
        self.lens_M[: self.num_live_rows] = 1
        for buffers in self.pages:
            buffers.clear(self.num_live_tokens)
        self.num_live_tokens = self.num_live_rows = 0

    def batch(
        self,
        query_lens: tuple[int, ...],
        *,
        query_start_B1: torch.Tensor,
        logit_rows_R: torch.Tensor,
        all_ranks_decode: bool,
    ) -> ForwardBatch:
        """A step on these buffers, with the longest possible keys: kernels size their grids by them."""
        num_tokens, num_rows = sum(query_lens), len(query_lens)
        batches = [
            ForwardBatch(
                input_ids_T=self.ids_M[:num_tokens],
                positions_T=self.positions_M[:num_tokens],
                slots_T=pages.slots_M[:num_tokens],
                query_start_B1=query_start_B1[: num_rows + 1],
                seq_lens_B=self.lens_M[:num_rows],
                page_table_BP=pages.table_MP[:num_rows],
                logit_rows_R=logit_rows_R[:num_rows],
                query_lens=query_lens,
                seq_lens=(self.longest,) * num_rows,
                page_size=self.page_size,
                all_ranks_decode=all_ranks_decode,
                num_live=self.num_live,
            )
            for pages in self.pages
        ]
        return replace(batches[0], sliding=batches[1]) if len(batches) > 1 else batches[0]
