"""Top-k, min-p and top-p in plain torch: which tokens may be drawn. Draws nothing.

Each filter keeps a prefix of the tokens sorted by probability, so a row has a single cutoff. It is usually among the
first few tokens, so those are sorted first, and only rows with a later cutoff are sorted completely. Of tokens with
equal probability at the cutoff, those with the smaller ids stay. A row's result does not depend on the other rows.

The host decides which rows to sort completely, and waits for the device to do so. Rows with a `top_k` up to 256 never
need it.

Shape letters: R rows, V vocabulary, K tokens of a sorted head.
"""

from dataclasses import dataclass

import torch

from engine.sequence import Sequence
from engine.transfer import to_device

_HEAD = 256


@dataclass(frozen=True, slots=True)
class _Rules:
    """Per row: at most `top_k` tokens, their mass up to `top_p`, at least `min_p` times the best one's probability."""

    top_k_R1: torch.Tensor
    top_p_R1: torch.Tensor
    min_p_R1: torch.Tensor

    @classmethod
    def of(cls, seqs: list[Sequence], vocab_size: int, device: torch.device) -> "_Rules":
        rows = [
            [min(seq.sampling.top_k or vocab_size, vocab_size), _limit(seq.sampling.top_p), seq.sampling.min_p]
            for seq in seqs
        ]
        return cls(*to_device(rows, torch.float64, device).split(1, dim=1))

    def select(self, rows: torch.Tensor) -> "_Rules":
        return _Rules(self.top_k_R1[rows], self.top_p_R1[rows], self.min_p_R1[rows])

    def count_kept(self, sorted_RK: torch.Tensor) -> torch.Tensor:
        """How many tokens of each row stay, at least 1; [R, 1]. The mass of all tokens is 1."""
        sorted_RK = sorted_RK.double()
        in_top_k_RK = torch.arange(sorted_RK.shape[1], device=sorted_RK.device) < self.top_k_R1
        mass_RK = (sorted_RK * in_top_k_RK).cumsum(dim=-1)
        has_all_R1 = in_top_k_RK.sum(dim=-1, keepdim=True) == self.top_k_R1
        total_R1 = torch.where(has_all_R1, mass_RK[:, -1:], 1.0)
        kept_RK = in_top_k_RK & (mass_RK - sorted_RK < self.top_p_R1 * total_R1)
        kept_RK &= sorted_RK >= self.min_p_R1 * sorted_RK[:, :1]
        return kept_RK.sum(dim=-1, keepdim=True).clamp_(min=1)


def _limit(top_p: float) -> float:
    return top_p if top_p < 1.0 else 2.0  # 1 keeps all: the sum of all probabilities may be a rounding error above it


def is_filtered(seq: Sequence) -> bool:
    """True when some token may not be drawn for its rank or probability."""
    return seq.sampling.top_p < 1.0 or seq.sampling.top_k > 0 or seq.sampling.min_p > 0.0


def filter_probs(probs_RV: torch.Tensor, seqs: list[Sequence]) -> torch.Tensor:
    """The probabilities, not normalized again, with 0 for the tokens that each row's filters drop."""
    vocab_size = probs_RV.shape[1]
    rules = _Rules.of(seqs, vocab_size, probs_RV.device)
    head_RK = probs_RV.topk(min(_HEAD, vocab_size), dim=-1).values
    num_kept_R1 = rules.count_kept(head_RK)
    lowest_R1 = head_RK.gather(1, num_kept_R1 - 1)
    if vocab_size > _HEAD and not all(0 < seq.sampling.top_k <= _HEAD for seq in seqs):
        is_open_R = ((num_kept_R1 == _HEAD) | (rules.top_k_R1 < vocab_size)).logical_and_(rules.top_k_R1 > _HEAD)[:, 0]
        open_rows = is_open_R.nonzero()[:, 0]
        if len(open_rows):
            # One row at a time: on a CPU torch sorts a single row several times faster than one of many.
            sorted_RV = torch.stack([probs_RV[row].sort(descending=True).values for row in open_rows.tolist()])
            num_kept_R1[open_rows] = rules.select(open_rows).count_kept(sorted_RV)
            lowest_R1[open_rows] = sorted_RV.gather(1, num_kept_R1[open_rows] - 1)
    kept_RV = probs_RV >= lowest_R1
    if probs_RV.device.type != "cpu" or not torch.equal(kept_RV.sum(dim=-1, keepdim=True), num_kept_R1):
        kept_RV = _drop_surplus(probs_RV, lowest_R1, kept_RV, num_kept_R1)
    return probs_RV * kept_RV


def _drop_surplus(
    probs_RV: torch.Tensor, lowest_R1: torch.Tensor, kept_RV: torch.Tensor, num_kept_R1: torch.Tensor
) -> torch.Tensor:
    """Of the tokens that are exactly as probable as the last one kept, leave as many as fit, smaller ids first."""
    at_cut_RV = probs_RV == lowest_R1
    num_above_R1 = (kept_RV & ~at_cut_RV).sum(dim=-1, keepdim=True)
    return kept_RV & (~at_cut_RV | (at_cut_RV.cumsum(dim=-1) <= num_kept_R1 - num_above_R1))
