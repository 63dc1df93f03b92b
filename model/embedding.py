"""Token embedding and the output head. A tied head uses the embedding's own matrix.

Tensor-parallel ranks divide both by rows of the vocabulary: DeepSeek-V3 has 1.9 GB in each, and a step looks up few
rows, so the sum over ranks costs less than the room that every rank would lose.
Shape letters: T tokens, V vocabulary, U rows of it on this rank, S ranks, H hidden, R logit rows.
"""

import torch
from torch import nn
from torch.nn import functional as F

from model.fused import fused_kernels
from model.layer import Layer
from model.linear import Linear, LinearWeight
from moe.group import SINGLE_RANK, Group, PartialSum, SumPlace


class Embedding(Layer):
    """Rows of `weight` [U, H] by token id; this rank has those from `first_row` on, the ranks of `tp` the others."""

    def __init__(self, weight_UH: torch.Tensor, *, first_row: int = 0, tp: Group = SINGLE_RANK) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_UH, requires_grad=False)
        self.first_row = first_row
        self._tp = tp

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor | PartialSum:
        """int64 [T] to [T, H], or to this rank's part of it: the rows that it has, and zeros."""
        if self._tp.size == 1:
            return F.embedding(ids_T, self.weight)
        part_TH = self._tp.empty((ids_T.shape[0], self.weight.shape[1]), self.weight.dtype, ids_T.device, SumPlace.MLP)
        if (kernels := fused_kernels(ids_T.device)) is not None:
            kernels.embed(ids_T, self.weight, self.first_row, part_TH)
        elif self.weight.shape[0] == 0:  # fewer rows in the vocabulary than ranks need
            part_TH.zero_()
        else:
            rows_T = ids_T - self.first_row
            is_own_T = (rows_T >= 0) & (rows_T < self.weight.shape[0])
            torch.mul(F.embedding(rows_T * is_own_T, self.weight), is_own_T[:, None], out=part_TH)
        return PartialSum(part_TH, self._tp, SumPlace.MLP)


class OutputHead(Layer):
    """Hidden states to fp32 logits; computed for the wanted rows only, and whole on every rank of `tp`.

    Every rank but the last has the same number of rows, the last may have fewer, or some of the last none.
    """

    def __init__(self, weight_UH: LinearWeight, *, tp: Group = SINGLE_RANK) -> None:
        super().__init__()
        self.linear = Linear(weight_UH)
        # On a GPU the product is written as the fp32 sum that it is, which spares a pass over the logits.
        self._weight_HU: torch.Tensor | None = None
        if isinstance(weight_UH, torch.Tensor) and weight_UH.dtype == torch.bfloat16:
            self._weight_HU = weight_UH.t() if weight_UH.device.type == "cuda" else None
        self._tp = tp
        self._num_rows = weight_UH.shape[0]
        num_rows_by_rank = tp.all_gather(torch.tensor([self._num_rows], device=weight_UH.device)).tolist()
        self._most_rows, self._vocab_size = max(num_rows_by_rank), sum(num_rows_by_rank)

    def forward(self, x_RH: torch.Tensor, out_RV: torch.Tensor | None = None) -> torch.Tensor:
        """[R, H] to fp32 [R, V], which is `out` if one is given."""
        if self._tp.size == 1:
            return self._own_logits(x_RH, out_RV)
        own_RU = self._own_logits(x_RH)
        logits_RV = own_RU.new_empty(x_RH.shape[0], self._vocab_size) if out_RV is None else out_RV
        self._tp.gather_columns(own_RU, logits_RV, self._most_rows)
        return logits_RV

    def _own_logits(self, x_RH: torch.Tensor, out_RU: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 [R, U]."""
        if self._weight_HU is not None and x_RH.dtype == torch.bfloat16:
            if self.linear.has_kernel_for(x_RH.shape[0]):
                if out_RU is None:
                    out_RU = x_RH.new_empty((x_RH.shape[0], self._num_rows), dtype=torch.float32)
                summed_RU: torch.Tensor = self.linear(x_RH, out_RU)
                return summed_RU
            return torch.mm(x_RH, self._weight_HU, out_dtype=torch.float32, out=out_RU)
        logits_RU: torch.Tensor = self.linear(x_RH)
        return logits_RU.float() if out_RU is None else out_RU.copy_(logits_RU)
