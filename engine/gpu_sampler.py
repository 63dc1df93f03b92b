"""Chooses the tokens of a step on a GPU with kernels of our own. Nothing here waits for the device.

Every combination of temperature, filters, penalties, bias, masks and log-probabilities takes the same launches,
whatever the number of rows:

    clear_counts, add_counts     if a request has penalties
    penalize_and_mask, add_bias  if a request has them
    row_stats, combine           always; greedy rows have their token now
    collect, draw_tokens         if a row is drawn
    row_stats, combine, collect, rank_tokens on the model's own logits, if a request wants log-probabilities

Where nothing but the third and the fourth line is needed, a captured graph launches them (`engine.gpu_sample_graphs`).
Torch operators compute the log-probabilities of tokens that a request lists itself, which is rare.

What the host knows of the rows travels in one pinned copy. `engine.sampler` is the reference in plain torch.

Shape letters: L rows of logits, R rows that sample, D drawn ones, W that want log-probabilities, V vocabulary, S chunks
of a row, G groups, C candidates, M places of running requests, K alternatives.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton

from engine import gpu_draw, gpu_logits, gpu_rows
from engine.gpu_counts import TokenTable
from engine.gpu_params import NUM_FLOATS, NUM_INTS, RequestRules, Rows, pack, ranked_numbers, row_numbers
from engine.gpu_sample_graphs import SampleGraphs
from engine.logprobs import PendingLogprobs, launch_listed
from engine.sampler import PendingTokens
from engine.sequence import Sequence
from engine.transfer import to_host
from engine.types import EngineRequest, SamplingParams
from moe.kernels.compile_ahead import launch

_NUM_WARPS = 8
_ENTRIES = 256  # per program


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Sizes of the kernels' pieces, powers of two; a row has at most `max_groups` groups."""

    chunk: int = 4096
    group: int = 128
    list_size: int = 2048
    block: int = 1024
    max_groups: int = 2048


class GpuSampler:
    """Owns the token counts and the buffers between the kernels. `tokens_M` keeps the tokens for the next step."""

    def __init__(self, tokens_M: torch.Tensor, vocab_size: int, tiling: Tiling | None = None) -> None:
        tiling = tiling or Tiling()
        max_num_seqs, device = len(tokens_M), tokens_M.device
        self.vocab_size, self.tokens_M = vocab_size, tokens_M
        self.table = TokenTable(max_num_seqs, vocab_size, device)
        self._list_size, self._block = tiling.list_size, tiling.block
        self._group = max(tiling.group, triton.next_power_of_2(-(-vocab_size // tiling.max_groups)))
        self._chunk = max(tiling.chunk, self._group)
        self._num_chunks = -(-vocab_size // self._chunk)
        self._num_groups = self._num_chunks * (self._chunk // self._group)

        def empty(dtype: torch.dtype, *width: int) -> torch.Tensor:
            return torch.empty(max_num_seqs, *width, dtype=dtype, device=device)

        self._maxima_MS = empty(torch.float32, self._num_chunks)
        self._ids_MS = empty(torch.int32, self._num_chunks)
        self._groups_MG = empty(torch.float32, self._num_groups)
        self._best_M, self._cut_M, self._num_listed_M = empty(torch.float32), empty(torch.int32), empty(torch.int32)
        self._masses_MS = empty(torch.int64, self._num_chunks)
        self._listed_bits_MC, self._listed_ids_MC = (empty(torch.int32, self._list_size) for _ in "ab")
        self._unused_M = empty(torch.int64)
        self._graphs: SampleGraphs | None = None

    def launch(
        self, logits_LV: torch.Tensor, seqs: list[Sequence], logit_rows: list[int], places: list[int]
    ) -> PendingTokens:
        """Choose the next token of each sequence from its row of fp32 logits, which may be overwritten.

        `places` are the sequences' lines of `tokens_M`. Every token before the chosen one must be in `token_ids`.
        """
        rules = [self._rules(seq) for seq in seqs]
        ints, floats, edits = row_numbers(seqs, rules, logit_rows, places, self.vocab_size)
        drawn = [row for row, rule in enumerate(rules) if rule.kind]
        is_plain = edits.is_empty and not any([seq.sampling.logprobs is not None for seq in seqs])
        if is_plain and self._graphs is not None and self._graphs.serves(logits_LV, len(seqs)):
            return self._graphs.launch(ints, floats, drawn)
        penalized = [row for row, rule in enumerate(rules) if rule.has_penalties]
        cleared, entries = self.table.changes([seqs[row] for row in penalized], [places[row] for row in penalized])
        num_tops = [seq.sampling.logprobs for seq in seqs]
        wanted = [row for row, num_top in enumerate(num_tops) if num_top is not None]
        num_top = min(max((num_tops[row] or 0 for row in wanted), default=0), self.vocab_size)
        is_edited = {logit_rows[row] for row in edits.rows} | {cell >> 32 for cell in edits.bias_cells}
        sources = [logit_rows[row] for row in wanted]
        keeps_copy = not is_edited.isdisjoint(sources)
        words = pack(
            [
                ints, floats, _ints(drawn), cleared, entries,
                _ints(edits.rows), edits.mask_words(), _ints(edits.bias_cells), np.array(edits.bias_values),
                *ranked_numbers(wanted, list(range(len(wanted))) if keeps_copy else sources, num_top),
                np.arange(len(wanted)), _ints(sources),
            ],
            logits_LV.device,
        )  # fmt: skip
        step = _StepWords(*words)
        listed = launch_listed(logits_LV, logit_rows, [seq.sampling.logprob_token_ids for seq in seqs])
        raw_LV = logits_LV.index_select(0, step.raw_rows_W) if keeps_copy else logits_LV
        self._edit(logits_LV, step)
        tokens_R = torch.empty(len(seqs), dtype=torch.int64, device=logits_LV.device)
        self._choose(Rows(logits_LV, step.ints, step.floats, step.drawn_D, tokens_R))
        logprobs = self._rank(Rows(raw_LV, step.ranked_ints, step.ranked_floats, step.all_W, tokens_R), num_top)
        return PendingTokens(tokens_R, to_host(tokens_R), num_tops, logprobs if wanted else None, listed)

    def warm_up(self) -> None:
        """Compile and load every kernel. Leaves no trace: no request is running yet."""
        sampling = SamplingParams(
            max_tokens=1, top_k=2, top_p=0.5, min_p=0.1, presence_penalty=1.0, logit_bias={0: 1.0}, logprobs=1
        )
        request = EngineRequest(request_id="warm-up", prompt_ids=[0], sampling=sampling)
        allowed = np.ones(self.vocab_size, dtype=bool)
        seq = Sequence(request, stop_ids=frozenset(), seed=0, logit_mask=lambda ids: allowed)
        logits_LV = torch.zeros(1, self.vocab_size, device=self.tokens_M.device)
        self.launch(logits_LV, [seq], [0], [0])

    def capture(self, logits_MV: torch.Tensor, sizes: list[int]) -> None:
        """See `Sampler`."""
        self._graphs = SampleGraphs(logits_MV, sizes, self._choose)
        self._graphs.capture()

    def _rules(self, seq: Sequence) -> RequestRules:
        if seq.sampler_state is None:
            seq.sampler_state = RequestRules.of(
                seq,
                num_groups=-(-self.vocab_size // self._group),
                list_size=self._list_size,
                vocab_size=self.vocab_size,
            )
        rules: RequestRules = seq.sampler_state
        return rules

    def _edit(self, logits_LV: torch.Tensor, step: "_StepWords") -> None:
        counts_MV, stride, num_tokens = self.table.counts_MV, logits_LV.stride(0), self.vocab_size
        if len(step.cleared_places):
            grid = (len(step.cleared_places), self._num_chunks)
            launch(gpu_logits.clear_counts, grid)(step.cleared_places, counts_MV, num_tokens, CHUNK=self._chunk)
        if num := len(step.count_entries):
            launch(gpu_logits.add_counts, (triton.cdiv(num, _ENTRIES),))(
                step.count_entries, counts_MV, num_tokens, num, gpu_logits.IN_PROMPT, BLOCK=_ENTRIES
            )
        self.table.commit()
        if len(step.edited_rows):
            launch(gpu_logits.penalize_and_mask, (len(step.edited_rows), self._num_chunks))(
                logits_LV, step.edited_rows, step.ints, step.floats.view(torch.float64), counts_MV,
                step.masks.view(torch.uint8), num_tokens, stride,
                NUM_INTS=NUM_INTS, NUM_FLOATS=NUM_FLOATS, CHUNK=self._chunk, num_warps=_NUM_WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip
        if num := len(step.bias_cells):
            launch(gpu_logits.add_bias, (triton.cdiv(num, _ENTRIES),))(
                logits_LV, step.bias_cells, step.bias_values.view(torch.float64), stride, num, BLOCK=_ENTRIES
            )

    def _choose(self, rows: Rows) -> None:
        self._find_best(rows, keep=True)
        if len(rows.listed_D):
            self._collect(rows)
            self._draw(rows)

    def _find_best(self, rows: Rows, *, keep: bool) -> None:
        num_rows = rows.ints.numel() // NUM_INTS
        launch(gpu_rows.row_stats, (num_rows, self._num_chunks))(
            rows.logits_LV, rows.ints, self._maxima_MS, self._ids_MS, self._groups_MG, self.vocab_size,
            rows.logits_LV.stride(0), self._num_chunks,
            NUM_INTS=NUM_INTS, CHUNK=self._chunk, GROUP=self._group, num_warps=_NUM_WARPS,
        )  # fmt: skip
        launch(gpu_rows.combine, (num_rows,))(
            rows.ints, rows.floats.view(torch.float64), self._maxima_MS, self._ids_MS, self._groups_MG, self._best_M,
            self._cut_M, self._num_listed_M, rows.tokens_R if keep else self._unused_M, self.tokens_M,
            self._num_chunks, self._num_groups,
            NUM_INTS=NUM_INTS, NUM_FLOATS=NUM_FLOATS, S_PAD=triton.next_power_of_2(self._num_chunks),
            G_PAD=triton.next_power_of_2(self._num_groups), KEEP=keep,
        )  # fmt: skip

    def _collect(self, rows: Rows) -> None:
        launch(gpu_rows.collect, (len(rows.listed_D), self._num_chunks))(
            rows.logits_LV, rows.listed_D, rows.ints, rows.floats.view(torch.float64), self._best_M, self._cut_M,
            self._masses_MS, self._num_listed_M, self._listed_bits_MC, self._listed_ids_MC, self.vocab_size,
            rows.logits_LV.stride(0), self._num_chunks,
            NUM_INTS=NUM_INTS, NUM_FLOATS=NUM_FLOATS, CHUNK=self._chunk, C=self._list_size, num_warps=_NUM_WARPS,
        )  # fmt: skip

    def _draw(self, rows: Rows) -> None:
        launch(gpu_draw.draw_tokens, (len(rows.listed_D),))(
            rows.logits_LV, rows.listed_D, rows.ints, rows.floats.view(torch.float64), self._best_M, self._cut_M,
            self._masses_MS, self._num_listed_M, self._listed_bits_MC, self._listed_ids_MC, rows.tokens_R,
            self.tokens_M, self.vocab_size, rows.logits_LV.stride(0), self._num_chunks,
            NUM_INTS=NUM_INTS, NUM_FLOATS=NUM_FLOATS, CHUNK=self._chunk,
            S_PAD=triton.next_power_of_2(self._num_chunks), C=self._list_size, BLOCK=self._block,
            num_warps=_NUM_WARPS,
        )  # fmt: skip

    def _rank(self, rows: Rows, num_top: int) -> PendingLogprobs | None:
        """Log-probabilities by the rows' logits; `tokens_R` are those of all rows that sample."""
        num_rows, device = len(rows.listed_D), rows.logits_LV.device
        if not num_rows:
            return None
        self._find_best(rows, keep=False)
        self._collect(rows)
        chosen_W = torch.empty(num_rows, dtype=torch.int64, device=device)
        chosen_values_W = torch.empty(num_rows, device=device)
        top_ids_WK = torch.empty(num_rows, num_top, dtype=torch.int64, device=device)
        top_values_WK = torch.empty(num_rows, num_top, device=device)
        launch(gpu_draw.rank_tokens, (num_rows,))(
            rows.logits_LV, rows.ints, self._best_M, self._masses_MS, self._num_listed_M, self._listed_ids_MC,
            rows.tokens_R, chosen_W, chosen_values_W, top_ids_WK, top_values_WK, self.vocab_size,
            rows.logits_LV.stride(0), self._num_chunks, num_top,
            NUM_INTS=NUM_INTS, S_PAD=triton.next_power_of_2(self._num_chunks), C=self._list_size, BLOCK=self._block,
            num_warps=_NUM_WARPS,
        )  # fmt: skip
        tops = (to_host(top_ids_WK), to_host(top_values_WK)) if num_top else (None, None)
        return PendingLogprobs(to_host(chosen_W), to_host(chosen_values_W), *tops)


@dataclass(frozen=True, slots=True)
class _StepWords:
    """What the host tells the device about a step, in the order in which it is packed. All are vectors of int64."""

    ints: torch.Tensor
    floats: torch.Tensor
    drawn_D: torch.Tensor
    cleared_places: torch.Tensor
    count_entries: torch.Tensor
    edited_rows: torch.Tensor
    masks: torch.Tensor
    bias_cells: torch.Tensor
    bias_values: torch.Tensor
    ranked_ints: torch.Tensor
    ranked_floats: torch.Tensor
    all_W: torch.Tensor
    raw_rows_W: torch.Tensor


def _ints(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)
