"""Token embedding and the output head. A tied head uses the embedding's own matrix.

Tensor-parallel ranks divide both by rows of the vocabulary: DeepSeek-V3 has 1.9 GB in each, and a step looks up few
rows, so the sum over ranks costs less than the room that every rank would lose.
Shape letters: T tokens, V vocabulary, U rows of it on this rank, H hidden, R logit rows.
"""

import torch
from torch import nn
from torch.nn import functional as F

from model.linear import Linear, LinearWeight
from moe.group import SINGLE_RANK, Group


class Embedding(nn.Module):
    """Rows of `weight` [U, H] by token id; this rank has those from `first_row` on, the ranks of `tp` the others."""

    def __init__(self, weight_UH: torch.Tensor, *, first_row: int = 0, tp: Group = SINGLE_RANK) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_UH, requires_grad=False)
        self.first_row = first_row
        self._tp = tp

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """int64 [T] to [T, H]."""
        if self._tp.size == 1:
            return F.embedding(ids_T, self.weight)
        rows_T = ids_T - self.first_row
        is_own_T = (rows_T >= 0) & (rows_T < self.weight.shape[0])
        if self.weight.shape[0] == 0:  # fewer rows in the vocabulary than ranks need
            x_TH = self.weight.new_zeros((ids_T.shape[0], self.weight.shape[1]))
        else:
            x_TH = F.embedding(rows_T * is_own_T, self.weight) * is_own_T[:, None]
        return self._tp.all_reduce(x_TH)


class OutputHead(nn.Module):
    """Hidden states to fp32 logits; computed for the wanted rows only, and whole on every rank of `tp`.

    Every rank but the last has the same number of rows, the last may have fewer, or some of the last none.
    """

    def __init__(self, weight_UH: LinearWeight, *, tp: Group = SINGLE_RANK) -> None:
        super().__init__()
        self.linear = Linear(weight_UH)
        self._tp = tp
        self._num_rows = weight_UH.shape[0]
        num_rows_by_rank = tp.all_gather(torch.tensor([self._num_rows], device=weight_UH.device)).tolist()
        self._most_rows, self._vocab_size = max(num_rows_by_rank), sum(num_rows_by_rank)

    def forward(self, x_RH: torch.Tensor) -> torch.Tensor:
        """[R, H] to fp32 [R, V]."""
        logits_RU: torch.Tensor = self.linear(x_RH)
        if self._tp.size == 1:
            return logits_RU.float()
        padded_RU = F.pad(logits_RU, (0, self._most_rows - self._num_rows))
        by_rank = self._tp.all_gather(padded_RU).chunk(self._tp.size)
        return torch.cat(by_rank, dim=1)[:, : self._vocab_size].float().contiguous()
