"""`DecodeGraphs`: forward passes of decode steps, captured in CUDA graphs, one per padded batch size. Sampling is not
captured: it is launched later, when the host knows the tokens that logits processors need.

A captured step costs one launch from the host instead of hundreds. The graphs read the step from buffers whose
addresses never change; padding rows decode a token of a spare page that no request owns, and nobody reads their result.

Shape letters: N rows of a graph, M rows of the largest one, P pages of the longest request, V vocabulary.
"""

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.errors import EngineConfigError
from loaders.progress import Progress
from model.batch import ForwardBatch, LayerKv

if TYPE_CHECKING:
    from engine.runner import Model

_FINE_SIZES = (1, 2, 4, 8)  # a padded row costs much in a small batch; in larger ones, steps of 8 cost little
_COARSE_FROM = 64

logger = logging.getLogger(__name__)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture, ascending; the last one is `max_num_seqs`."""
    sizes = [*_FINE_SIZES, *range(16, _COARSE_FROM + 1, 8), *range(_COARSE_FROM + 32, max_num_seqs + 1, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Captured decode steps of one model over one KV cache. No request ever gets the page `spare_page`."""

    def __init__(
        self,
        model: "Model",
        kv: Sequence[LayerKv],
        *,
        page_size: int,
        max_num_seqs: int,
        max_model_len: int,
        spare_page: int,
    ) -> None:
        device, num_pages = model.device, -(-max_model_len // page_size)
        self._model, self._kv, self._page_size = model, list(kv), page_size
        self.sizes = graph_sizes(max_num_seqs)
        self._ids_M, self._positions_M = (torch.zeros(max_num_seqs, dtype=torch.int64, device=device) for _ in "ab")
        self._slots_M = torch.full_like(self._ids_M, spare_page * page_size)
        self._lens_M = torch.ones(max_num_seqs, dtype=torch.int32, device=device)
        self._table_MP = torch.full((max_num_seqs, num_pages), spare_page, dtype=torch.int32, device=device)
        self._rows_M = torch.arange(max_num_seqs, device=device)
        self._starts_M1 = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._logits_MV = torch.empty(max_num_seqs, model.vocab_size, dtype=torch.float32, device=device)
        self._spare_slot = spare_page * page_size
        self._num_live = 0  # rows whose buffers hold a request of the last step
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size, the largest first, since the others then fit in its memory.

        Raises:
            EngineConfigError: a size cannot be captured; the message says which settings to change.
        """
        start_s, before_bytes = time.monotonic(), torch.cuda.memory_reserved()
        with Progress("capturing decode steps", len(self.sizes)) as progress:
            for size in reversed(self.sizes):
                try:
                    self._graphs[size] = self._capture(size)
                except Exception as error:  # torch's or Triton's: out of memory, or a kernel that cannot be captured
                    raise EngineConfigError(
                        f"a decode step of {size} requests cannot be captured in a CUDA graph: {error}; "
                        "set enforce_eager to serve without graphs, or lower max_num_seqs or gpu_memory_utilization"
                    ) from error
                progress.advance()
        logger.info(
            "captured decode steps of up to %d requests in %.1f s, %.2f GiB",
            self.sizes[-1], time.monotonic() - start_s, (torch.cuda.memory_reserved() - before_bytes) / 2**30,
        )  # fmt: skip

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        batch = self._batch(size)
        plan = self._model.plan(batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles and allocates now, which a capture must not do
            self._model(batch, plan, self._kv)
        torch.cuda.current_stream().wait_stream(stream)
        self._model.prepare_replay()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        largest = next(iter(self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=None if largest is None else largest.pool()):
            self._logits_MV[:size].copy_(self._model(batch, plan, self._kv))
        return graph

    def _batch(self, size: int) -> ForwardBatch:
        """The first `size` rows of the buffers, with the longest possible lengths: kernels size their grids by them."""
        return ForwardBatch(
            input_ids_T=self._ids_M[:size],
            positions_T=self._positions_M[:size],
            slots_T=self._slots_M[:size],
            query_start_B1=self._starts_M1[: size + 1],
            seq_lens_B=self._lens_M[:size],
            page_table_BP=self._table_MP[:size],
            logit_rows_R=self._rows_M[:size],
            query_lens=(1,) * size,
            seq_lens=(self._table_MP.shape[1] * self._page_size,) * size,
            page_size=self._page_size,
            all_ranks_decode=True,
            max_rank_tokens=size,
        )

    def serves(self, batch: ForwardBatch) -> bool:
        """True for a step in which each of at most `max_num_seqs` requests decodes and samples one token.

        Ranks that agree on `max_rank_tokens` replay a graph together or not at all.
        """
        if batch.max_rank_tokens is not None and not batch.all_ranks_decode:
            return False
        return batch.is_decode and batch.logit_rows_R.shape[0] == batch.num_tokens <= self.sizes[-1]

    def size_for(self, num_rows: int) -> int:
        """Rows of the graph that decodes `num_rows` requests, at most `max_num_seqs`."""
        return next(size for size in self.sizes if size >= num_rows)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """fp32 logits [N, V] of a step that `serves` accepts; the next replay overwrites them."""
        num_live = batch.num_tokens
        size = self.size_for(max(num_live, batch.max_rank_tokens or 0))
        self._ids_M[:num_live].copy_(batch.input_ids_T)
        self._positions_M[:num_live].copy_(batch.positions_T)
        self._slots_M[:num_live].copy_(batch.slots_T)
        self._lens_M[:num_live].copy_(batch.seq_lens_B)
        self._table_MP[:num_live, : batch.page_table_BP.shape[1]].copy_(batch.page_table_BP)
        if num_live < self._num_live:  # rows no longer in use must not write to pages that others own now
            self._slots_M[num_live : self._num_live] = self._spare_slot
            self._lens_M[num_live : self._num_live] = 1
        self._num_live = num_live
        self._model.prepare_replay()
        self._graphs[size].replay()
        return self._logits_MV[:num_live]
