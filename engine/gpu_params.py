"""What the sampling kernels are told about the rows of a step, packed for one copy to the device.

Everything is built from host data, in 64-bit words. Kernels find a row's numbers by column; the columns are named here.

Shape letters: R rows that sample, D drawn ones, E rows with penalties or a mask, N numbers of any list.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.counter_rng import uniform
from engine.gpu_rows import FILTERED, LEAST_BITS, PLAIN
from engine.sequence import GREEDY_TEMPERATURE, Sequence, has_penalties
from engine.token_masks import TokenMasks, make_masks
from engine.transfer import to_device

NUM_INTS = 10
"""Columns of a row's integers: row of the logits, place of the request (-1: nobody keeps the token), whether it has
penalties, first byte of its mask (-1: none), how it is drawn (0: greedy), rank of the group where candidates begin (0:
at the weight in the next column), that weight, `top_k`, `min_p` as a weight, spare."""

NUM_FLOATS = 6
"""Columns of a row's floats: temperature, `top_p`, the draw, repetition, frequency and presence penalty."""

_TOP_P_RANK = 512  # candidates when nothing says how many tokens `top_p` needs
_MOST_RANK = 1024  # of lists that hold twice as many


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that the kernels work on together, those of them that are drawn or ranked, and where tokens are."""

    logits_LV: torch.Tensor
    ints: torch.Tensor
    floats: torch.Tensor  # bits of fp64 numbers
    listed_D: torch.Tensor  # -1: no row
    tokens_R: torch.Tensor


@dataclass(slots=True)
class RequestRules:
    """What stays the same in every step of a request; kept as its `sampler_state`."""

    kind: int
    top_k: int
    min_bits: int
    cut: int
    rank: int
    floats: tuple[float, float, float, float, float]  # all columns but the draw
    has_penalties: bool

    @classmethod
    def of(cls, seq: Sequence, *, num_groups: int, list_size: int, vocab_size: int) -> "RequestRules":
        """The rules of a request for rows of `num_groups` groups and lists of `list_size` candidates."""
        sampling = seq.sampling
        is_drawn = sampling.temperature > GREEDY_TEMPERATURE
        top_k = sampling.top_k if sampling.top_k < vocab_size else 0
        min_bits = _weight_pattern(sampling.min_p)
        is_filtered = top_k > 0 or sampling.top_p < 1.0 or min_bits > 0
        rank, cut = 0, LEAST_BITS
        if is_drawn and is_filtered and vocab_size > list_size:
            if top_k or sampling.top_p < 1.0:
                rank = min(top_k or _TOP_P_RANK, _MOST_RANK, num_groups)
            else:
                cut = max(min_bits, LEAST_BITS)
        return cls(
            kind=0 if not is_drawn else FILTERED if is_filtered else PLAIN,
            top_k=top_k,
            min_bits=min_bits,
            cut=cut,
            rank=rank,
            floats=(
                sampling.temperature, sampling.top_p, sampling.repetition_penalty, sampling.frequency_penalty,
                sampling.presence_penalty,
            ),
            has_penalties=has_penalties(seq),
        )  # fmt: skip


def _weight_pattern(weight: float) -> int:
    """Bit pattern of the smallest fp32 number that is not below `weight`."""
    number = np.float32(weight)
    if number < weight:
        number = np.nextafter(number, np.float32(2))
    return int(number.view(np.int32))


def pack(parts: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays of 64-bit numbers on the device as int64 vectors, by one copy. Each starts at a multiple of 16 bytes."""
    words: list[np.ndarray] = []
    spans, start = [], 0
    for part in parts:
        spans.append((start, part.size))
        if part.size:
            words.append(part.reshape(-1).view(np.int64))
            if part.size % 2:
                words.append(_PADDING)
            start += part.size + part.size % 2
    sent = to_device(np.concatenate(words), torch.int64, device)
    return [sent[start : start + size] for start, size in spans]


_PADDING = np.zeros(1, dtype=np.int64)


@dataclass(slots=True)
class StepEdits:
    """What changes the logits of a step before tokens are chosen, as numbers on the host."""

    rows: list[int] = field(default_factory=list)  # with penalties or a mask
    masks: TokenMasks | None = None
    bias_cells: list[int] = field(default_factory=list)  # (row of the logits << 32) + id
    bias_values: list[float] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing changes."""
        return not (self.rows or self.bias_cells)

    def mask_words(self) -> np.ndarray:
        """All masks as 64-bit words."""
        if self.masks is None:
            return np.zeros(0, dtype=np.int64)
        words = self.masks.words_EN.reshape(-1)
        return np.pad(words, (0, len(words) % 2)).view(np.int64)

    def add_bias(self, seq: Sequence, logit_row: int) -> None:
        """Add the bias of a request."""
        self.bias_cells += [(logit_row << 32) + token for token in seq.sampling.logit_bias]
        self.bias_values += seq.sampling.logit_bias.values()


def row_numbers(
    seqs: list[Sequence], rules: list[RequestRules], logit_rows: list[int], places: list[int], vocab_size: int
) -> tuple[np.ndarray, np.ndarray, StepEdits]:
    """Integers [R, NUM_INTS] and floats [R, NUM_FLOATS] of the rows, and what changes their logits.

    Makes the requests' masks, so every token before the one to choose must be in `token_ids`.
    """
    ints, floats = [], []
    masks = make_masks(seqs, vocab_size)
    edits, mask_starts = StepEdits(masks=masks), {}
    if masks is not None:
        mask_starts = {row: index * masks.words_EN.shape[1] * 4 for index, row in enumerate(masks.rows)}
    for index, (seq, rule, logit_row, place) in enumerate(zip(seqs, rules, logit_rows, places, strict=True)):
        mask_start = mask_starts.get(index, -1)
        if not seq.is_plain_greedy:
            if rule.has_penalties or mask_start >= 0:
                edits.rows.append(index)
            if seq.sampling.logit_bias:
                edits.add_bias(seq, logit_row)
        draw = uniform(seq.seed, seq.num_output) if rule.kind else 0.0
        ints.append((
            logit_row, place, rule.has_penalties, mask_start, rule.kind, rule.rank, rule.cut, rule.top_k,
            rule.min_bits, 0,
        ))  # fmt: skip
        floats.append((*rule.floats[:2], draw, *rule.floats[2:]))
    return np.array(ints, dtype=np.int64), np.array(floats, dtype=np.float64), edits


def ranked_numbers(rows: list[int], sources: list[int], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The same for rows of which the `rank` best tokens are wanted: `rows` among those that sample, their logits."""
    ints = np.zeros((len(rows), NUM_INTS), dtype=np.int64)
    floats = np.ones((len(rows), NUM_FLOATS))
    ints[:, 0], ints[:, 1], ints[:, 3] = sources, rows, -1
    ints[:, 4:7] = (FILTERED if rank else PLAIN, rank, LEAST_BITS)
    return ints, floats
