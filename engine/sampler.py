"""Chooses the next token of every row. Logits processors, filters and random numbers live in `logits`, `filters` and
`counter_rng`.

Shape letters: R rows (sequences that sample in this step), V vocabulary.

A draw is an inverse-CDF lookup in order of token id: one number of the request decides, and rounding differences in
the logits move a boundary by as little as they move the probabilities. Filters act after the temperature and in the
order top-k, then min-p and top-p on what is left; each keeps a head of the tokens sorted by probability.
"""

from dataclasses import dataclass

import torch

from engine.counter_rng import uniform
from engine.filters import filter_probs, is_filtered
from engine.logits import apply_rules
from engine.logprobs import token_logprobs
from engine.sequence import GREEDY_TEMPERATURE, Sequence
from engine.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """Per row: the token, None where the logits were not finite; log-probabilities where they were asked for."""

    tokens: list[int | None]
    logprobs: list[TokenLogprobs | None]


def sample(logits_RV: torch.Tensor, seqs: list[Sequence]) -> Sampled:
    """Next token of each sequence from its row of float32 logits, which may be overwritten."""
    best_R, best_ids_R = logits_RV.max(dim=-1)  # a NaN anywhere in a row becomes its maximum
    best: list[int] = best_ids_R.masked_fill(~best_R.isfinite(), _BROKEN).tolist()
    broken = [token == _BROKEN for token in best]
    if all(seq.is_plain_greedy for seq in seqs):
        tokens = best
        logprobs: list[TokenLogprobs | None] = [None] * len(seqs)
    else:
        if any(broken):
            logits_RV[torch.tensor(broken, device=logits_RV.device)] = 0.0  # keep the arithmetic of the others quiet
        wanted = [row for row, seq in enumerate(seqs) if seq.sampling.logprobs is not None]
        raw_WV = torch.log_softmax(logits_RV[wanted], dim=-1) if wanted else None
        apply_rules(logits_RV, seqs)
        tokens = _choose(logits_RV, seqs)
        logprobs = [None] * len(seqs)
        if raw_WV is not None:
            num_top = max(seqs[row].sampling.logprobs or 0 for row in wanted)
            entries = token_logprobs(raw_WV, [tokens[row] for row in wanted], num_top)
            for row, entry in zip(wanted, entries, strict=True):
                logprobs[row] = TokenLogprobs(entry.token_id, entry.logprob, entry.top[: seqs[row].sampling.logprobs])
    return Sampled([None if bad else token for token, bad in zip(tokens, broken, strict=True)], logprobs)


_BROKEN = -1  # stands for a token id where the row's logits are not finite


def _choose(logits_RV: torch.Tensor, seqs: list[Sequence]) -> list[int]:
    drawn = [row for row, seq in enumerate(seqs) if seq.sampling.temperature > GREEDY_TEMPERATURE]
    if len(drawn) == len(seqs):
        return _draw(logits_RV, seqs)
    tokens: list[int] = logits_RV.argmax(dim=-1).tolist()
    if drawn:
        for row, token in zip(drawn, _draw(logits_RV[drawn], [seqs[row] for row in drawn]), strict=True):
            tokens[row] = token
    return tokens


def _draw(logits_RV: torch.Tensor, seqs: list[Sequence]) -> list[int]:
    device = logits_RV.device
    temperature_R1 = torch.tensor([[seq.sampling.temperature] for seq in seqs], dtype=torch.float32, device=device)
    # Relative to the best token nothing overflows: a NaN would make the search below return an id that does not exist.
    probs_RV = torch.softmax((logits_RV - logits_RV.amax(dim=-1, keepdim=True)) / temperature_R1, dim=-1)
    filtered = [row for row, seq in enumerate(seqs) if is_filtered(seq)]
    if len(filtered) == len(seqs):
        probs_RV = filter_probs(probs_RV, seqs)
    elif filtered:
        probs_RV[filtered] = filter_probs(probs_RV[filtered], [seqs[row] for row in filtered])
    cdf_RV = probs_RV.cumsum(dim=-1, dtype=torch.float64)
    draws_R1 = torch.tensor([[uniform(seq.seed, seq.num_output)] for seq in seqs], dtype=torch.float64, device=device)
    # A draw is at most 1 - 2**-52, so the product stays below the last entry and no token of probability 0 is chosen.
    chosen_R1 = torch.searchsorted(cdf_RV, draws_R1 * cdf_RV[:, -1:], right=True)
    tokens: list[int] = chosen_R1[:, 0].tolist()
    return tokens
