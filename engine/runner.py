"""Turns a `StepBatch` into a `ForwardBatch`, launches the model and the sampler on it, and collects the results.

Shape letters: T tokens of the step, L of them late, B rows of the step, P pages of the longest row's request, G page
tables, R logit rows, V vocabulary, M rows of a page table.
The integers of a step are built in two numpy arrays, one of 64 and one of 32 bits, so that each reaches the device in
one copy; the tensors of the batch are views of them. A model whose sliding layers have pages of their own has a second
page table, and the batch a second view with those pages.
"""

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import split_with_sizes  # `Tensor.split` does the same after checks in Python

from engine.choose_sampler import make_sampler
from engine.cuda_graphs import DecodeGraphs
from engine.logprobs import PendingLogprobs, launch_prompt_logprobs
from engine.prompt_graphs import PromptGraphs
from engine.sampler import PendingTokens, Sampler
from engine.sequence import Sequence
from engine.step import LATE_ID, StepBatch, StepRow
from engine.transfer import Mark, to_device
from engine.types import TokenLogprobs
from model.balance import ExpertBalance
from model.batch import ForwardBatch, KvLayerSpec, LayerKv
from moe.check.selfcheck import SelfCheckReport
from moe.group import TokenMail


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
    balance: ExpertBalance | None

    @property
    def asks_num_live(self) -> bool:
        """Whether captured steps have to say how many of their tokens are not padding (`ForwardBatch.num_live`)."""

    @property
    def moe_layers(self) -> ListLike[MoePath]:
        """Empty for a model without experts."""

    def why_not_capturable(self, max_num_tokens: int) -> str | None:
        """None if decode steps of up to `max_num_tokens` tokens can be captured in CUDA graphs, else what cannot."""

    @property
    def can_compile_ahead(self) -> bool:
        """Whether a step harms nothing while Triton kernels are only compiled, not launched."""

    @property
    def plans_by_tables(self) -> bool:
        """Whether `update_plan` reads the page tables of the batch, which then hold the step before a replay."""

    @property
    def token_mail(self) -> TokenMail | None:
        """How ranks that do not sample can get their tokens in a captured step; None if no kernel can do it."""

    def prepare_replay(self) -> None:
        """What cannot be part of a captured step; called before each capture and replay."""

    def plan(self, batch: ForwardBatch) -> Any:
        """What attention works out once a step, outside a captured graph; for this batch only."""

    def plan_for_graph(self, batch: ForwardBatch) -> Any:
        """The same for a step to be captured, whose rows may have other lengths in each replay."""

    def update_plan(self, plan: Any, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
        """Bring a plan for a graph up to date with the lengths of its rows; called before each replay, outside it."""

    def __call__(
        self, batch: ForwardBatch, plan: Any, kv: list[LayerKv], logits_RV: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [R, V] in float32, written to `logits_RV` if it is given."""

    def run_idle(self, max_rank_tokens: int, all_ranks_decode: bool) -> None:
        """Take part in a step of other ranks, of up to `max_rank_tokens` tokens each, with no tokens of its own."""


class ModelRunner:
    """Owns the KV tensors, the page tables, the captured graphs and the tokens that steps chose last.

    `StepRow.row` is the request's line in the page table and its place in `tokens_M`, where the token that its last
    step chose stays on the device. So the next step can be launched before the host knows the token.
    """

    def __init__(
        self,
        model: Model,
        kv: list[LayerKv],
        *,
        page_size: int,
        max_num_seqs: int,
        max_model_len: int,
        is_sliding: bool = False,
    ) -> None:
        """`is_sliding`: sliding layers have pages of their own (`KvLayout.window`)."""
        self.model = model
        self.kv = kv
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self.share_tokens: Callable[[torch.Tensor], None] | None = None  # gives `tokens_M` to ranks that do not sample
        self.page_size = page_size
        self.tokens_M = torch.zeros(max_num_seqs, dtype=torch.int64, device=model.device)
        self.sampler = make_sampler(self.tokens_M, model.vocab_size)
        table_shape = (max_num_seqs, -(-max_model_len // page_size))
        self._page_table = np.zeros(table_shape, dtype=np.int32)
        self._sliding_table = np.zeros(table_shape, dtype=np.int32) if is_sliding else None

    @property
    def is_sliding(self) -> bool:
        """Whether sliding layers have pages of their own."""
        return self._sliding_table is not None

    @torch.inference_mode()
    def launch(self, step: StepBatch) -> "Pending":
        """Start the forward pass of a step, which writes the keys and values of its tokens. Does not wait for a GPU."""
        if self.graphs is not None and self.graphs.serves(step):
            tables = self._update_tables(step)
            if self.share_tokens is not None and not self.graphs.inputs.delivers_tokens and step.has_late_ids:
                self.share_tokens(self.tokens_M)
            logits_RV = self.graphs.run(step, tables)
        else:
            logits_RV = self._run_mixed(self.make_batch(step))
        return Pending(step, logits_RV, self.sampler)

    def _run_mixed(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of a step that no decode graph serves."""
        if self.prompt_graphs is not None:
            if batch.max_rank_tokens is not None:
                batch = replace(batch, max_rank_tokens=self.prompt_graphs.agreed_tokens(batch.max_rank_tokens))
            size = self.prompt_graphs.size_for(batch)
            if size is not None:
                return self.prompt_graphs.run(batch, size)
        return self.model(batch, self.model.plan(batch), self.kv)

    @torch.inference_mode()
    def run_idle(self, max_rank_tokens: int, all_ranks_decode: bool) -> None:
        """Take part in a step for which this rank has no tokens; the arguments are what the ranks agreed on."""
        if self.graphs is not None and all_ranks_decode:
            self.graphs.run_idle(max_rank_tokens)
            return
        if self.prompt_graphs is not None:
            max_rank_tokens = self.prompt_graphs.agreed_tokens(max_rank_tokens)
            if self.prompt_graphs.run_idle(max_rank_tokens):
                return
        self.model.run_idle(max_rank_tokens, all_ranks_decode)

    def make_batch(self, step: StepBatch) -> ForwardBatch:
        """The batch of a step, on the model's device. Brings the page tables up to date."""
        tables = self._update_tables(step)
        rows, num_rows = step.rows, len(step.rows)
        query_lens = [row.num_tokens for row in rows]
        seq_lens = [row.start + row.num_tokens for row in rows]
        table_rows = np.array([row.row for row in rows])
        num_pages = -(-max(seq_lens) // self.page_size)

        num_lens, num_entries = 2 * num_rows + 1, len(tables) * num_rows * num_pages
        ints32 = np.empty(num_lens + num_entries, dtype=np.int32)
        ints32[:num_lens] = [0, *accumulate(query_lens), *seq_lens]
        tables_GBP = ints32[num_lens:].reshape(len(tables), num_rows, num_pages)
        for rows_BP, table in zip(tables_GBP, tables, strict=True):
            rows_BP[:] = table[table_rows, :num_pages]
        numbers32 = to_device(ints32, torch.int32, self.model.device)
        query_start_B1, seq_lens_B, entries = split_with_sizes(numbers32, [num_rows + 1, num_rows, num_entries])
        device_tables_BP = entries.view(len(tables), num_rows, num_pages).unbind()

        logit_rows = _logit_rows(step, ints32[1 : num_rows + 1])
        (late,) = (step.input_ids == LATE_ID).nonzero()
        sources = (table_rows if step.is_decode else np.repeat(table_rows, query_lens))[late]
        parts = (step.input_ids, step.positions, step.slots, step.sliding_slots, logit_rows, late, sources)
        numbers64 = to_device(np.concatenate(parts), torch.int64, self.model.device)
        ids_T, positions_T, slots_T, sliding_slots_T, logit_rows_R, late_L, sources_L = split_with_sizes(
            numbers64, [len(part) for part in parts]
        )
        if len(late):
            if self.share_tokens is not None:
                self.share_tokens(self.tokens_M)
            ids_T.index_copy_(0, late_L, self.tokens_M.index_select(0, sources_L))
        make = partial(
            ForwardBatch,
            input_ids_T=ids_T,
            positions_T=positions_T,
            query_start_B1=query_start_B1,
            seq_lens_B=seq_lens_B,
            logit_rows_R=logit_rows_R,
            query_lens=tuple(query_lens),
            seq_lens=tuple(seq_lens),
            page_size=self.page_size,
            all_ranks_decode=step.all_ranks_decode,
            max_rank_tokens=step.max_rank_tokens,
        )
        sliding = None
        if self._sliding_table is not None:
            sliding = make(slots_T=sliding_slots_T, page_table_BP=device_tables_BP[1])
        return make(slots_T=slots_T, page_table_BP=device_tables_BP[0], sliding=sliding)

    def _update_tables(self, step: StepBatch) -> list[np.ndarray]:
        """The page tables, one for each kind of layers, with the pages that came with this step."""
        _update(self._page_table, step.page_updates)
        if self._sliding_table is None:
            return [self._page_table]
        _update(self._sliding_table, step.sliding_page_updates)
        return [self._page_table, self._sliding_table]


def _update(table: np.ndarray, updates: np.ndarray) -> None:
    """Write (row, column, page) entries [U, 3] into a page table."""
    if len(updates):
        table[updates[:, 0], updates[:, 1]] = updates[:, 2]


def _logit_rows(step: StepBatch, query_ends: np.ndarray) -> np.ndarray:
    """Rows of T: of each request, ending at `query_ends[b]`, the last `num_logit_rows`."""
    if step.is_decode:
        return np.array([index for index, row in enumerate(step.rows) if row.num_logit_rows], dtype=np.int64)
    counts = np.array([row.num_logit_rows for row in step.rows])
    return np.arange(counts.sum()) + np.repeat(query_ends - np.cumsum(counts), counts)


class RowResult(msgspec.Struct, frozen=True, eq=False):
    """The result of one row of a step: a token if it samples and its logits are finite and not all forbidden."""

    token: int | None = None
    is_finite: bool = True
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt tokens after the row's tokens


_NOTHING = RowResult()


class Pending:
    """A launched step. First `sample`, once the host knows every earlier token; then `collect`.

    The two are apart so that logits processors can use the tokens of the step before, while this one is computed.
    """

    def __init__(self, step: StepBatch, logits_RV: torch.Tensor, sampler: Sampler) -> None:
        self.step = step
        self.logits_RV: torch.Tensor | None = logits_RV  # fp32, `num_logit_rows` of each row; given up when sampled
        self._sampler = sampler
        self._sampled: tuple[list[int], PendingTokens] | None = None  # rows of the step, their tokens
        self._prompts: dict[int, PendingLogprobs] = {}  # by row of the step
        self._mark: Mark | None = None  # after all that `sample` launched: the results are on the host

    @torch.inference_mode()
    def sample(self, seqs: list[Sequence | None]) -> None:
        """Launch the choice of tokens; `seqs[b]` is the request of row b, None if nobody wants its token any more.

        The tokens stay on the device, too, for a step that is launched before this one is collected.
        """
        logits_RV, self.logits_RV = self.logits_RV, None
        if logits_RV is None:
            raise RuntimeError("a step is sampled twice: its logits are gone")
        members, wanted, logit_rows, end = [], [], [], 0
        for index, (row, seq) in enumerate(zip(self.step.rows, seqs, strict=True)):
            start, end = end, end + row.num_logit_rows
            if seq is None:
                continue
            if seq.wants_prompt_logprobs:
                self._prompts[index] = _launch_prompt_logprobs(row, seq, logits_RV[start:end])
            if row.samples:
                members.append(index)
                wanted.append(seq)
                logit_rows.append(end - 1)
        mark = None
        if members:
            places = [self.step.rows[index].row for index in members]
            tokens = self._sampler.launch(logits_RV, wanted, logit_rows, places)
            self._sampled, mark = (members, tokens), tokens.copy_mark
        self._mark = Mark(logits_RV.device) if mark is None else mark

    def collect(self) -> list[RowResult]:
        """Wait for the step and return the result of each row; empty for rows that nobody wanted."""
        if self._mark is None:
            raise RuntimeError("a step is collected before it is sampled")
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
    ids_R = to_device(next_ids, torch.int64, logits_RV.device)
    return launch_prompt_logprobs(logits_RV[: len(next_ids)], ids_R, seq.sampling.prompt_logprobs or 0)
