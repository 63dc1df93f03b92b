"""Logits processors: bias, penalties, masks. They change logits and choose nothing.

They read the tokens that the host knows, so they run after the step before is collected. The model computes meanwhile.

Shape letters: R rows (sequences that sample in this step), E rows that are masked, V vocabulary.
"""

from collections.abc import Sequence as ListLike

import torch

from engine.sequence import Sequence, has_penalties
from engine.token_masks import make_masks
from engine.transfer import to_device


class TokenCounts:
    """Which tokens a sequence has met, as dense rows on the device, brought up to date from its token list."""

    def __init__(self, seq: Sequence, vocab_size: int, device: torch.device) -> None:
        self.counts_V = torch.zeros(vocab_size, dtype=torch.float32, device=device)  # of generated tokens
        self.in_prompt_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt_V.index_fill_(0, to_device(seq.token_ids[: seq.num_prompt], torch.int64, device), True)
        self.num_counted = seq.num_prompt

    def update(self, seq: Sequence) -> None:
        """Count the tokens generated since the last call."""
        if len(seq.token_ids) > self.num_counted:
            new = to_device(seq.token_ids[self.num_counted :], torch.int64, self.counts_V.device)
            self.counts_V.index_add_(0, new, torch.ones(len(new), device=self.counts_V.device))
            self.num_counted = len(seq.token_ids)


class LogitsProcessors:
    """What changes the logits of one sequence; kept as its `sampler_state`."""

    def __init__(self, seq: Sequence, vocab_size: int, device: torch.device) -> None:
        sampling = seq.sampling
        self.seen = TokenCounts(seq, vocab_size, device) if has_penalties(seq) else None
        self.bias_ids = to_device(list(sampling.logit_bias), torch.int64, device)
        self.bias = to_device(list(sampling.logit_bias.values()), torch.float32, device)

    def apply(self, logits_V: torch.Tensor, seq: Sequence) -> None:
        """Change one row in place."""
        if self.seen is not None:
            self.seen.update(seq)
            _penalize(logits_V, self.seen, seq)
        if len(self.bias):
            logits_V[self.bias_ids] += self.bias


def _penalize(logits_V: torch.Tensor, seen: TokenCounts, seq: Sequence) -> None:
    sampling = seq.sampling
    if sampling.repetition_penalty != 1.0:
        factor = sampling.repetition_penalty
        met_V = seen.in_prompt_V | (seen.counts_V > 0)
        logits_V.copy_(torch.where(met_V, torch.where(logits_V > 0, logits_V / factor, logits_V * factor), logits_V))
        logits_V.clamp_(max=torch.finfo(logits_V.dtype).max)  # dividing may have made an infinity
    if sampling.frequency_penalty != 0.0:
        logits_V -= sampling.frequency_penalty * seen.counts_V
    if sampling.presence_penalty != 0.0:
        logits_V -= sampling.presence_penalty * (seen.counts_V > 0)


def process_logits(logits_RV: torch.Tensor, seqs: ListLike[Sequence]) -> bool:
    """Run the logits processors of each sequence on its row, in place. Returns whether a row was masked."""
    for row, seq in enumerate(seqs):
        if seq.sampling.logit_bias or has_penalties(seq):
            if seq.sampler_state is None:
                seq.sampler_state = LogitsProcessors(seq, logits_RV.shape[1], logits_RV.device)
            seq.sampler_state.apply(logits_RV[row], seq)
    masks = make_masks(seqs, logits_RV.shape[1])
    if masks is None:
        return False
    device = logits_RV.device
    rows_E = to_device(masks.rows, torch.int64, device)
    forbidden_EV = to_device(~masks.allowed_EV(logits_RV.shape[1]), torch.bool, device)
    allowed_EV = logits_RV.index_select(0, rows_E).masked_fill_(forbidden_EV, float("-inf"))
    logits_RV.index_copy_(0, rows_E, allowed_EV)
    return True
