"""Forward passes captured in CUDA graphs: `DecodeGraphs`, one per padded number of requests that decode.

Steps with short prompts are in `prompt_graphs`. Sampling is not captured: it is launched later, when the host knows
the tokens that logits processors need.

A captured step costs one launch from the host instead of hundreds. The graphs read the step from buffers whose
addresses never change; padding writes to a spare page that no request owns, and nobody reads its result.

Shape letters: N tokens or rows of a graph, M of the largest one, P pages of the longest request, V vocabulary.
"""

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from engine.errors import EngineConfigError
from loaders.progress import Progress
from model.batch import ForwardBatch, LayerKv

if TYPE_CHECKING:
    from engine.runner import Model

_FINE_SIZES = (1, 2, 4, 8)  # a padded row costs much in a small batch; in larger ones, steps of 8 cost little
_COARSE_FROM = 64
_Size = TypeVar("_Size", bound=Hashable)

logger = logging.getLogger(__name__)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture, ascending; the last one is `max_num_seqs`."""
    sizes = [*_FINE_SIZES, *range(16, _COARSE_FROM + 1, 8), *range(_COARSE_FROM + 32, max_num_seqs + 1, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class PageBuffers:
    """Slots [tokens] and page table [rows, P] of one kind of layer, as graphs read them.

    Tokens without a request write to the spare page. Rows without one keep the pages of the row's last request, which
    are read and never written.
    """

    def __init__(
        self, max_tokens: int, max_rows: int, num_pages: int, page_size: int, spare_page: int, device: torch.device
    ) -> None:
        self._spare_slot = spare_page * page_size
        self.slots_M = torch.full((max_tokens,), self._spare_slot, dtype=torch.int64, device=device)
        self.table_MP = torch.full((max_rows, num_pages), spare_page, dtype=torch.int32, device=device)

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
        self.ids_M, self.positions_M = (torch.zeros(max_tokens, dtype=torch.int64, device=device) for _ in "ab")
        self.lens_M = torch.ones(max_rows, dtype=torch.int32, device=device)
        self._num_live = torch.zeros(1, dtype=torch.int32, device=device) if counts_live else None
        kinds = 2 if is_sliding else 1
        self.pages = [PageBuffers(max_tokens, max_rows, num_pages, page_size, spare_page, device) for _ in range(kinds)]
        self.num_live_tokens = self.num_live_rows = 0  # of the last step

    def fill(self, batch: ForwardBatch) -> None:
        """Take a step's numbers. Rows and tokens after them are as in a step without any request."""
        num_tokens, num_rows = batch.num_tokens, len(batch.query_lens)
        self.ids_M[:num_tokens].copy_(batch.input_ids_T)
        self.positions_M[:num_tokens].copy_(batch.positions_T)
        self.lens_M[:num_rows].copy_(batch.seq_lens_B)
        if self._num_live is not None:
            self._num_live.fill_(num_tokens)
        if num_rows < self.num_live_rows:
            self.lens_M[num_rows : self.num_live_rows] = 1
        for buffers, step in zip(self.pages, (batch, batch.sliding), strict=False):
            if step is not None:
                buffers.fill(step, self.num_live_tokens)
        self.num_live_tokens, self.num_live_rows = num_tokens, num_rows

    def clear(self) -> None:
        """As in a step without any request."""
        if self._num_live is not None:
            self._num_live.fill_(0)
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
                num_live=self._num_live,
            )
            for pages in self.pages
        ]
        return replace(batches[0], sliding=batches[1]) if len(batches) > 1 else batches[0]


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """What the graphs of one engine share. `logits_MV`: fp32, where every graph leaves its logits."""

    model: "Model"
    kv: list[LayerKv]
    logits_MV: torch.Tensor
    page_size: int
    max_num_seqs: int
    max_model_len: int
    spare_page: int
    is_sliding: bool

    def buffers(self, max_tokens: int, max_rows: int) -> StepBuffers:
        """Buffers for steps of up to so many tokens and rows."""
        return StepBuffers(
            max_tokens=max_tokens, max_rows=max_rows, max_model_len=self.max_model_len, page_size=self.page_size,
            spare_page=self.spare_page, is_sliding=self.is_sliding, counts_live=self.model.asks_num_live,
            device=self.model.device,
        )  # fmt: skip

    def run(self, batch: ForwardBatch) -> None:
        """The forward pass of this batch, without a graph."""
        self.model(batch, self.model.plan_for_graph(batch), self.kv, self.logits_MV[: batch.logit_rows_R.shape[0]])

    def capture(self, batch: ForwardBatch, pool: "torch.cuda._POOL_HANDLE | None") -> "CapturedStep":
        """The forward pass of this batch, in a graph that shares the memory of `pool`."""
        model, plan = self.model, self.model.plan_for_graph(batch)
        logits_RV = self.logits_MV[: batch.logit_rows_R.shape[0]]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles and allocates now, which a capture must not do
            model(batch, plan, self.kv, logits_RV)
        torch.cuda.current_stream().wait_stream(stream)
        model.prepare_replay()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            model(batch, plan, self.kv, logits_RV)
        return CapturedStep(model, graph, plan)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured forward pass, with the attention plan that its kernels read."""

    model: "Model"
    graph: torch.cuda.CUDAGraph
    plan: Any

    def replay(self, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
        """Run it for rows of these lengths, padding included, after the buffers were filled."""
        self.model.update_plan(self.plan, query_lens, seq_lens)
        self.graph.replay()


def capture_all(
    what: str,
    sizes: Sequence[_Size],
    capture: Callable[[_Size], CapturedStep],
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Capture every size, the largest first, since the others then fit in its memory. `advance` is called after each.

    Raises:
        EngineConfigError: a size cannot be captured; the message says which settings to change.
    """
    start_s, before_bytes = time.monotonic(), torch.cuda.memory_reserved()
    with Progress(f"capturing {what}", len(sizes)) as progress:
        for size in reversed(sizes):
            try:
                capture(size)
            except Exception as error:  # torch's or Triton's: out of memory, or a kernel that cannot be captured
                raise EngineConfigError(
                    f"a step of {size} cannot be captured in a CUDA graph: {error}; "
                    "set enforce_eager to serve without graphs, or lower max_num_seqs or gpu_memory_utilization"
                ) from error
            progress.advance()
            advance()
    logger.info(
        "captured %s, %d sizes up to %s, in %.1f s, %.2f GiB",
        what, len(sizes), sizes[-1], time.monotonic() - start_s,
        (torch.cuda.memory_reserved() - before_bytes) / 2**30,
    )  # fmt: skip


class DecodeGraphs:
    """Steps in which every request decodes one token. No request ever gets the settings' spare page."""

    def __init__(self, settings: GraphSettings) -> None:
        self._settings = settings
        most, device = settings.max_num_seqs, settings.model.device
        self.sizes = graph_sizes(most)
        self.buffers = settings.buffers(most, most)
        self._rows_M = torch.arange(most, device=device)
        self._starts_M1 = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._graphs: dict[int, CapturedStep] = {}

    @torch.inference_mode()
    def capture(self, advance: Callable[[], None] = lambda: None) -> None:
        """Capture every size; `advance` is called after each. Raises EngineConfigError."""
        capture_all("decode steps", self.sizes, self._capture, advance)

    @torch.inference_mode()
    def run_sizes(self) -> None:
        """Run the steps that `capture` captures, without graphs."""
        for size in reversed(self.sizes):
            self._settings.run(self.batch(size))

    @property
    def pool(self) -> "torch.cuda._POOL_HANDLE | None":
        """The memory of the graphs; None before the first is captured."""
        first = next(iter(self._graphs.values()), None)
        return None if first is None else first.graph.pool()

    def _capture(self, size: int) -> CapturedStep:
        step = self._graphs[size] = self._settings.capture(self.batch(size), self.pool)
        return step

    def batch(self, size: int) -> ForwardBatch:
        """The first `size` rows of the buffers."""
        batch = self.buffers.batch(
            (1,) * size, query_start_B1=self._starts_M1, logit_rows_R=self._rows_M, all_ranks_decode=True
        )
        return replace(batch, max_rank_tokens=size)

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
        size = self.size_for(max(batch.num_tokens, batch.max_rank_tokens or 0))
        self.buffers.fill(batch)
        self._settings.model.prepare_replay()
        self._graphs[size].replay((1,) * size, batch.seq_lens + (1,) * (size - batch.num_tokens))
        return self._settings.logits_MV[: batch.num_tokens]

    def run_idle(self, max_rank_tokens: int) -> None:
        """Take part in a decode step of other ranks, with padding alone."""
        size = self.size_for(max_rank_tokens)
        self.buffers.clear()
        self._settings.model.prepare_replay()
        self._graphs[size].replay((1,) * size, (1,) * size)
