"""Turns a `StepBatch` into a `ForwardBatch`, launches the model and the sampler on it, and collects the results.

Shape letters: T tokens of the step, L of them late, B rows of the step, P pages of the longest row's request, R logit
rows, V vocabulary, M rows of the page table.
The integers of a step are built in two numpy arrays, one of 64 and one of 32 bits, so that each reaches the device in
one copy; the tensors of the batch are views of them.
"""

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from itertools import accumulate
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from engine.cuda_graphs import DecodeGraphs
from engine.logprobs import PendingLogprobs, launch_logprobs
from engine.sampler import PendingTokens, launch_sampling
from engine.sequence import Sequence
from engine.step import LATE_ID, StepBatch, StepRow
from engine.transfer import Mark, to_device
from engine.types import TokenLogprobs
from model.batch import ForwardBatch, KvLayerSpec, LayerKv
from moe.check.selfcheck import SelfCheckReport


class MoePath(Protocol):
    """What the engine needs of a MoE layer."""

    description: str
    selfcheck: SelfCheckReport | None


class Model(Protocol):
    """What the engine needs of a model."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    kv_specs: list[KvLayerSpec]
    dtype: torch.dtype
    device: torch.device

    @property
    def moe_layers(self) -> ListLike[MoePath]:
        """Empty for a model without experts."""

    def why_not_capturable(self, max_num_tokens: int) -> str | None:
        """None if decode steps of up to `max_num_tokens` tokens can be captured in CUDA graphs, else what cannot."""

    def prepare_replay(self) -> None:
        """What cannot be part of a captured step; called before each capture and replay."""

    def plan(self, batch: ForwardBatch) -> Any:
        """What attention works out once a step, outside a captured graph; for this batch only."""

    def __call__(self, batch: ForwardBatch, plan: Any, kv: list[LayerKv]) -> torch.Tensor:
        """Logits [R, V] in float32."""

    def run_idle(self, max_rank_tokens: int, all_ranks_decode: bool) -> None:
        """Take part in a step of other ranks, of up to `max_rank_tokens` tokens each, with no tokens of its own."""


class ModelRunner:
    """Owns the KV tensors, the page table, the captured graphs and the tokens that steps chose last.

    `StepRow.row` is the request's line in the page table and its place in `tokens_M`, where the token that its last
    step chose stays on the device. So the next step can be launched before the host knows the token.
    """

    def __init__(
        self, model: Model, kv: list[LayerKv], *, page_size: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.model = model
        self.kv = kv
        self.graphs: DecodeGraphs | None = None
        self.share_tokens: Callable[[torch.Tensor], None] | None = None  # gives `tokens_M` to ranks that do not sample
        self.page_size = page_size
        self.tokens_M = torch.zeros(max_num_seqs, dtype=torch.int64, device=model.device)
        self._page_table = np.zeros((max_num_seqs, -(-max_model_len // page_size)), dtype=np.int32)

    @torch.inference_mode()
    def launch(self, step: StepBatch) -> "Pending":
        """Start the forward pass of a step, which writes the keys and values of its tokens. Does not wait for a GPU."""
        batch = self.make_batch(step)
        if self.graphs is not None and self.graphs.serves(batch):
            logits_RV = self.graphs.run(batch)
        else:
            logits_RV = self.model(batch, self.model.plan(batch), self.kv)
        return Pending(step, logits_RV, self.tokens_M)

    @torch.inference_mode()
    def run_idle(self, max_rank_tokens: int, all_ranks_decode: bool) -> None:
        """Take part in a step for which this rank has no tokens; the arguments are what the ranks agreed on."""
        if self.graphs is not None and all_ranks_decode:
            max_rank_tokens = self.graphs.size_for(max_rank_tokens)
        self.model.run_idle(max_rank_tokens, all_ranks_decode)

    def make_batch(self, step: StepBatch) -> ForwardBatch:
        """The batch of a step, on the model's device. Brings the page table up to date."""
        updates = step.page_updates
        if len(updates):
            self._page_table[updates[:, 0], updates[:, 1]] = updates[:, 2]
        rows, num_rows = step.rows, len(step.rows)
        query_lens = [row.num_tokens for row in rows]
        seq_lens = [row.start + row.num_tokens for row in rows]
        table_rows = [row.row for row in rows]
        num_pages = -(-max(seq_lens) // self.page_size)

        ints32 = np.empty(num_rows * (2 + num_pages) + 1, dtype=np.int32)
        ints32[: 2 * num_rows + 1] = [0, *accumulate(query_lens), *seq_lens]
        ints32[2 * num_rows + 1 :].reshape(num_rows, num_pages)[:] = self._page_table[table_rows, :num_pages]
        numbers32 = to_device(ints32, torch.int32, self.model.device)

        num_tokens = len(step.input_ids)
        logit_rows = _logit_rows(step, ints32[1 : num_rows + 1])
        late = np.flatnonzero(step.input_ids == LATE_ID)
        sources = np.repeat(table_rows, query_lens)[late] if len(late) else late
        ints64 = np.concatenate((step.input_ids, step.positions, step.slots, logit_rows, late, sources))
        numbers64 = to_device(ints64, torch.int64, self.model.device)
        ids_T = numbers64[:num_tokens]
        if len(late):
            if self.share_tokens is not None:
                self.share_tokens(self.tokens_M)
            late_L, sources_L = numbers64[3 * num_tokens + len(logit_rows) :].chunk(2)
            ids_T.index_copy_(0, late_L, self.tokens_M.index_select(0, sources_L))
        return ForwardBatch(
            input_ids_T=ids_T,
            positions_T=numbers64[num_tokens : 2 * num_tokens],
            slots_T=numbers64[2 * num_tokens : 3 * num_tokens],
            query_start_B1=numbers32[: num_rows + 1],
            seq_lens_B=numbers32[num_rows + 1 : 2 * num_rows + 1],
            page_table_BP=numbers32[2 * num_rows + 1 :].view(num_rows, -1),
            logit_rows_R=numbers64[3 * num_tokens : 3 * num_tokens + len(logit_rows)],
            query_lens=tuple(query_lens),
            seq_lens=tuple(seq_lens),
            page_size=self.page_size,
            all_ranks_decode=step.all_ranks_decode,
            max_rank_tokens=step.max_rank_tokens,
        )


def _logit_rows(step: StepBatch, query_ends: np.ndarray) -> np.ndarray:
    """Rows of T: of each request, ending at `query_ends[b]`, the last `num_logit_rows`."""
    if step.is_decode:
        return np.array([index for index, row in enumerate(step.rows) if row.num_logit_rows], dtype=np.int64)
    counts = np.array([row.num_logit_rows for row in step.rows])
    return np.arange(counts.sum()) + np.repeat(query_ends - np.cumsum(counts), counts)


class RowResult(msgspec.Struct, frozen=True, eq=False):
    """The result of one row of a step: a token if it samples, unless its logits were not finite."""

    token: int | None = None
    is_finite: bool = True
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt tokens after the row's tokens


_NOTHING = RowResult()


class Pending:
    """A launched step. First `sample`, once the host knows every earlier token; then `collect`.

    The two are apart so that logits processors can use the tokens of the step before, while this one is computed.
    """

    def __init__(self, step: StepBatch, logits_RV: torch.Tensor, tokens_M: torch.Tensor) -> None:
        self.step = step
        self.logits_RV: torch.Tensor | None = logits_RV  # fp32, `num_logit_rows` of each row; given up when sampled
        self._tokens_M = tokens_M
        self._sampled: tuple[list[int], PendingTokens] | None = None  # rows of the step, their tokens
        self._prompts: dict[int, PendingLogprobs] = {}  # by row of the step
        self._mark = Mark(logits_RV.device)

    @torch.inference_mode()
    def sample(self, seqs: list[Sequence | None], *, keeps_tokens: bool = True) -> None:
        """Launch the choice of tokens; `seqs[b]` is the request of row b, None if nobody wants its token any more.

        `keeps_tokens`: the tokens stay on the device, too, for a step that is launched before this one is collected.
        """
        logits_RV, self.logits_RV = self.logits_RV, None
        if logits_RV is None:
            raise RuntimeError("a step is sampled twice: its logits are gone")
        members, logit_rows, end = [], [], 0
        for index, (row, seq) in enumerate(zip(self.step.rows, seqs, strict=True)):
            start, end = end, end + row.num_logit_rows
            if seq is None:
                continue
            if seq.wants_prompt_logprobs:
                self._prompts[index] = _launch_prompt_logprobs(row, seq, logits_RV[start:end])
            if row.samples:
                members.append(index)
                logit_rows.append(end - 1)
        if members:
            if len(members) < len(logits_RV):
                logits_RV = logits_RV.index_select(0, to_device(logit_rows, torch.int64, logits_RV.device))
            tokens = launch_sampling(logits_RV, [seq for index in members if (seq := seqs[index]) is not None])
            self._sampled = members, tokens
            if keeps_tokens:  # a row without a token is dropped when it is collected; until then it needs a valid id
                rows_R = to_device([self.step.rows[index].row for index in members], torch.int64, logits_RV.device)
                self._tokens_M.index_copy_(0, rows_R, tokens.tokens_R.clamp(min=0))
        self._mark = Mark(logits_RV.device)

    def collect(self) -> list[RowResult]:
        """Wait for the step and return the result of each row; empty for rows that nobody wanted."""
        self._mark.wait()
        results = [_NOTHING] * len(self.step.rows)
        for index, prompt in self._prompts.items():
            results[index] = RowResult(prompt_logprobs=prompt.read())
        if self._sampled is not None:
            members, tokens = self._sampled
            sampled = tokens.read()
            for index, token, logprobs in zip(members, sampled.tokens, sampled.logprobs, strict=True):
                results[index] = RowResult(token, token is not None, logprobs, results[index].prompt_logprobs)
        return results


def _launch_prompt_logprobs(row: StepRow, seq: Sequence, logits_RV: torch.Tensor) -> PendingLogprobs:
    """Entries of the prompt tokens after the row's tokens; the prompt's last token predicts none of them."""
    next_ids = seq.token_ids[row.start + 1 : row.start + row.num_tokens + 1]
    logprobs_RV = torch.log_softmax(logits_RV[: len(next_ids)], dim=-1)
    ids_R = to_device(next_ids, torch.int64, logits_RV.device)
    return launch_logprobs(logprobs_RV, ids_R, seq.sampling.prompt_logprobs or 0)
