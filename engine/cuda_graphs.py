"""Forward passes captured in CUDA graphs: `DecodeGraphs`, one per padded number of requests that decode.

Steps with short prompts are in `prompt_graphs`. Sampling is not captured: it is launched later, when the host knows
the tokens that logits processors need.

A captured step costs one launch from the host instead of hundreds. The graphs read the step from buffers whose
addresses never change (`step_buffers`).

Shape letters: B rows of a step, N of a graph, M of the largest one, P pages of the longest request, V vocabulary.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from engine.decode_inputs import DecodeInputs
from engine.errors import MachineError
from engine.step import StepBatch
from engine.step_buffers import StepBuffers
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

    def capture(
        self,
        batch: ForwardBatch,
        pool: "torch.cuda._POOL_HANDLE | None",
        fill: Callable[[], None] = lambda: None,
    ) -> "CapturedStep":
        """The forward pass of this batch, in a graph that shares the memory of `pool`. `fill` is a part of the graph,
        and launches what fills the tensors of the batch.
        """
        model, plan = self.model, self.model.plan_for_graph(batch)
        logits_RV = self.logits_MV[: batch.logit_rows_R.shape[0]]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles and allocates now, which a capture must not do
            fill()
            model(batch, plan, self.kv, logits_RV)
        torch.cuda.current_stream().wait_stream(stream)
        model.prepare_replay()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            fill()
            model(batch, plan, self.kv, logits_RV)
        return CapturedStep(model, graph, plan)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured forward pass, with the attention plan that its kernels read."""

    model: "Model"
    graph: torch.cuda.CUDAGraph
    plan: Any

    def replay(self, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
        """Run it for rows of these lengths, padding included. The buffers hold the step already, or the graph fills
        them, which it may not do where `Model.plans_by_tables`.
        """
        self.model.update_plan(self.plan, query_lens, seq_lens)
        self.graph.replay()


def capture_all(
    what: str,
    sizes: Sequence[_Size],
    capture: Callable[[_Size], object],
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Capture every size, the largest first, since the others then fit in its memory. `advance` is called after each.

    Raises:
        MachineError: a size cannot be captured; the message says which settings may help.
    """
    start_s, before_bytes = time.monotonic(), torch.cuda.memory_reserved()
    with Progress(f"capturing {what}", len(sizes)) as progress:
        for size in reversed(sizes):
            try:
                capture(size)
            except Exception as error:  # torch's or Triton's: out of memory, or a kernel that cannot be captured
                raise MachineError(
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

    def __init__(self, settings: GraphSettings, tokens_M: torch.Tensor) -> None:
        """`tokens_M`: see `DecodeInputs`."""
        self._settings = settings
        most, model = settings.max_num_seqs, settings.model
        self.sizes = graph_sizes(most)
        self.buffers = settings.buffers(most, most)
        self.inputs = DecodeInputs(self.buffers, tokens_M, model.token_mail, is_in_graph=not model.plans_by_tables)
        self._rows_M = torch.arange(most, device=model.device)
        self._starts_M1 = torch.arange(most + 1, dtype=torch.int32, device=model.device)
        self._graphs: dict[int, CapturedStep] = {}

    @torch.inference_mode()
    def capture(self, advance: Callable[[], None] = lambda: None) -> None:
        """Capture every size; `advance` is called after each. Raises MachineError."""
        capture_all("decode steps", self.sizes, self._capture, advance)

    @torch.inference_mode()
    def run_sizes(self) -> None:
        """Run the steps that `capture` captures, without graphs."""
        for size in reversed(self.sizes):
            self.inputs.spread(size)
            self._settings.run(self.batch(size))

    @property
    def pool(self) -> "torch.cuda._POOL_HANDLE | None":
        """The memory of the graphs; None before the first is captured."""
        first = next(iter(self._graphs.values()), None)
        return None if first is None else first.graph.pool()

    @property
    def logits_MV(self) -> torch.Tensor:
        """Where all graphs leave their logits."""
        return self._settings.logits_MV

    def _capture(self, size: int) -> CapturedStep:
        fill = partial(self.inputs.spread, size)
        step = self._graphs[size] = self._settings.capture(self.batch(size), self.pool, fill)
        return step

    def batch(self, size: int) -> ForwardBatch:
        """The first `size` rows of the buffers."""
        batch = self.buffers.batch(
            (1,) * size, query_start_B1=self._starts_M1, logit_rows_R=self._rows_M, all_ranks_decode=True
        )
        return replace(batch, max_rank_tokens=size, wants_all_rows=True)

    def serves(self, step: StepBatch) -> bool:
        """True for a step in which each of at most `max_num_seqs` requests decodes and samples one token.

        Ranks that agree on `max_rank_tokens` replay a graph together or not at all.
        """
        if step.max_rank_tokens is not None and not step.all_ranks_decode:
            return False
        return step.is_plain_decode and len(step.rows) <= self.sizes[-1]

    def size_for(self, num_rows: int) -> int:
        """Rows of the graph that decodes `num_rows` requests, at most `max_num_seqs`."""
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def run(self, step: StepBatch, tables: list[np.ndarray]) -> torch.Tensor:
        """fp32 logits [B, V] of a step that `serves` accepts; the next replay overwrites them.

        `tables`: page ids [places, P], one for each kind of layers.
        """
        num_rows, seq_lens = len(step.rows), [row.start + 1 for row in step.rows]
        self.inputs.send(step, seq_lens, tables)
        self._replay(max(num_rows, step.max_rank_tokens or 0), seq_lens)
        return self._settings.logits_MV[:num_rows]

    def run_idle(self, max_rank_tokens: int) -> None:
        """Take part in a decode step of other ranks, with padding alone."""
        self.inputs.send_nothing()
        self._replay(max_rank_tokens, [])

    def _replay(self, num_rows: int, seq_lens: list[int]) -> None:
        size = self.size_for(num_rows)
        self.inputs.spread_by_torch(size)
        self._settings.model.prepare_replay()
        self._graphs[size].replay((1,) * size, (*seq_lens, *(1,) * (size - len(seq_lens))))
