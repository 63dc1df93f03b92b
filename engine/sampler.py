"""Chooses the next token of every row in plain torch. Logits processors, filters and random numbers live in `logits`,
`filters` and `counter_rng`. `gpu_sampler` does the same with kernels; this is its reference, and what a CPU uses.

Shape letters: L rows of logits, R rows (sequences that sample in this step), W rows that want log-probabilities, V
vocabulary, M places of running requests.

A draw is an inverse-CDF lookup in order of token id: one number of the request decides, and rounding differences in
the logits move a boundary by as little as they move the probabilities. Filters act after the temperature and in the
order top-k, then min-p and top-p on what is left; each keeps a head of the tokens sorted by probability.

On a GPU without Triton the choice is launched and not waited for, except where a row's filters need a decision on the
host (`filters`): then the launch waits until the pass is computed.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.counter_rng import uniform
from engine.filters import filter_probs, is_filtered
from engine.logits import process_logits
from engine.logprobs import PendingListed, PendingLogprobs, launch_listed, launch_logprobs
from engine.sequence import GREEDY_TEMPERATURE, Sequence
from engine.transfer import Mark, to_device, to_host
from engine.types import TokenLogprobs

_BROKEN = -1  # stands for a token id where the row's logits are not finite, or all of them forbidden


@dataclass(frozen=True, slots=True)
class Sampled:
    """Per row: the token, None if the logits were not finite or all were forbidden; log-probabilities if asked for."""

    tokens: list[int | None]
    logprobs: list[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens that the device chooses. `tokens_R` stays there, -1 in rows without a token."""

    tokens_R: torch.Tensor
    host_tokens_R: torch.Tensor
    num_tops: list[int | None]  # alternatives that each row wants; None: no log-probabilities
    logprobs: PendingLogprobs | None  # of the rows that want them
    listed: PendingListed | None = None  # tokens that replace the best ones as alternatives
    copy_mark: Mark | None = None  # after the copies to the host and all before; None: any mark made later is

    def read(self) -> Sampled:
        """The tokens on the host; call after the device has passed `copy_mark`, or without it a mark made later."""
        tokens = [None if token == _BROKEN else token for token in self.host_tokens_R.tolist()]
        if self.logprobs is None:
            return Sampled(tokens, [None] * len(tokens))
        entries = iter(self.logprobs.read())
        listed = [] if self.listed is None else self.listed.read()
        logprobs: list[TokenLogprobs | None] = []
        for row, num_top in enumerate(self.num_tops):
            entry = None if num_top is None else next(entries)
            top = listed[row] if listed and listed[row] else entry and entry.top[:num_top]
            logprobs.append(entry and TokenLogprobs(entry.token_id, entry.logprob, top or []))
        return Sampled(tokens, logprobs)


class Sampler(Protocol):
    """Chooses the tokens of a step and keeps them on the device for the next one."""

    def launch(
        self, logits_LV: torch.Tensor, seqs: list[Sequence], logit_rows: list[int], places: list[int]
    ) -> PendingTokens:
        """Choose the next token of each sequence from its row of fp32 logits, which may be overwritten.

        `places`: where the next step finds the tokens. Every token before the chosen one must be in `token_ids`.
        """

    def warm_up(self) -> None:
        """Compile what the first request would wait for."""

    def capture(self, logits_MV: torch.Tensor, sizes: list[int]) -> None:
        """Capture what is launched for steps whose logits are the first rows of `logits_MV`; call it after `warm_up`.

        `sizes`: numbers of rows, ascending.
        """


class TorchSampler:
    """`launch_sampling` on the rows that sample; the tokens also go to their places in `tokens_M`."""

    def __init__(self, tokens_M: torch.Tensor) -> None:
        self._tokens_M = tokens_M

    def launch(
        self, logits_LV: torch.Tensor, seqs: list[Sequence], logit_rows: list[int], places: list[int]
    ) -> PendingTokens:
        """See `Sampler`."""
        device = logits_LV.device
        if len(logit_rows) < len(logits_LV):
            logits_LV = logits_LV.index_select(0, to_device(logit_rows, torch.int64, device))
        tokens = launch_sampling(logits_LV, seqs)
        # A row without a token is dropped when it is collected; until then it needs a valid id.
        places_R = to_device(places, torch.int64, device)
        self._tokens_M.index_copy_(0, places_R, tokens.tokens_R.clamp(min=0))
        return tokens

    def warm_up(self) -> None:
        """Nothing to compile."""

    def capture(self, logits_MV: torch.Tensor, sizes: list[int]) -> None:
        """Nothing: filters may need a decision on the host."""


def launch_sampling(logits_RV: torch.Tensor, seqs: list[Sequence]) -> PendingTokens:
    """Choose the next token of each sequence from its row of float32 logits, which may be overwritten.

    Every token before it must be in `token_ids`.
    """
    best_R, best_ids_R = _best(logits_RV)
    is_broken_R = ~best_R.isfinite()
    num_tops = [seq.sampling.logprobs for seq in seqs]
    if all(seq.is_plain_greedy for seq in seqs):
        tokens_R = best_ids_R.masked_fill_(is_broken_R, _BROKEN)
        return PendingTokens(tokens_R, to_host(tokens_R), num_tops, None)
    device = logits_RV.device
    if device.type != "cpu" or is_broken_R.any():  # a GPU is not asked: that would wait for it
        logits_RV.masked_fill_(is_broken_R[:, None], 0.0)  # keeps the arithmetic of the other rows quiet
    wanted = [row for row, num_top in enumerate(num_tops) if num_top is not None]
    wanted_W = to_device(wanted, torch.int64, device)
    raw_WV = torch.log_softmax(logits_RV.index_select(0, wanted_W), dim=-1) if wanted else None
    listed = launch_listed(logits_RV, list(range(len(seqs))), [seq.sampling.logprob_token_ids for seq in seqs])
    if process_logits(logits_RV, seqs):  # a mask may forbid every token
        is_broken_R |= logits_RV.amax(dim=-1) == float("-inf")
        logits_RV.masked_fill_(is_broken_R[:, None], 0.0)
    tokens_R = _choose(logits_RV, seqs)
    logprobs = None
    if raw_WV is not None:
        num_top = max(num_top or 0 for num_top in num_tops)
        logprobs = launch_logprobs(raw_WV, tokens_R.index_select(0, wanted_W), num_top)
    tokens_R = tokens_R.masked_fill(is_broken_R, _BROKEN)
    return PendingTokens(tokens_R, to_host(tokens_R), num_tops, logprobs, listed)


def _best(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row and the lowest token id that has it. A NaN anywhere in a row is its largest."""
    if logits_RV.device.type != "cpu":
        return torch.max(logits_RV, dim=-1)
    ids_R = torch.from_numpy(logits_RV.numpy().argmax(axis=-1))  # on a CPU ten times as fast as torch
    return logits_RV.gather(1, ids_R[:, None])[:, 0], ids_R


def _choose(logits_RV: torch.Tensor, seqs: list[Sequence]) -> torch.Tensor:
    """Token ids [R]."""
    drawn = [row for row, seq in enumerate(seqs) if seq.sampling.temperature > GREEDY_TEMPERATURE]
    if len(drawn) == len(seqs):
        return _draw(logits_RV, seqs)
    tokens_R = logits_RV.argmax(dim=-1)
    if drawn:
        rows = to_device(drawn, torch.int64, logits_RV.device)
        tokens_R.index_copy_(0, rows, _draw(logits_RV.index_select(0, rows), [seqs[row] for row in drawn]))
    return tokens_R


def _draw(logits_RV: torch.Tensor, seqs: list[Sequence]) -> torch.Tensor:
    device = logits_RV.device
    temperature_R1 = to_device([[seq.sampling.temperature] for seq in seqs], torch.float32, device)
    # Relative to the best token nothing overflows: a NaN would make the search below return an id that does not exist.
    probs_RV = torch.softmax((logits_RV - logits_RV.amax(dim=-1, keepdim=True)) / temperature_R1, dim=-1)
    filtered = [row for row, seq in enumerate(seqs) if is_filtered(seq)]
    if len(filtered) == len(seqs):
        probs_RV = filter_probs(probs_RV, seqs)
    elif filtered:
        rows = to_device(filtered, torch.int64, device)
        kept_RV = filter_probs(probs_RV.index_select(0, rows), [seqs[row] for row in filtered])
        probs_RV.index_copy_(0, rows, kept_RV)
    cdf_RV = probs_RV.cumsum(dim=-1, dtype=torch.float64)
    draws_R1 = to_device([[uniform(seq.seed, seq.num_output)] for seq in seqs], torch.float64, device)
    # A draw is at most 1 - 2**-52, so the product stays below the last entry and no token of probability 0 is chosen.
    return torch.searchsorted(cdf_RV, draws_R1 * cdf_RV[:, -1:], right=True)[:, 0]
