"""Token embedding and the output head. A tied head uses the embedding's own matrix."""

import torch
from torch import nn
from torch.nn import functional as F

from model.linear import Linear


class Embedding(nn.Module):
    """Rows of `weight` [V, H] by token id."""

    def __init__(self, weight_VH: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_VH, requires_grad=False)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """int64 [T] to [T, H]."""
        return F.embedding(ids_T, self.weight)


class OutputHead(nn.Module):
    """Hidden states to fp32 logits; computed for the wanted rows only."""

    def __init__(self, weight_VH: torch.Tensor) -> None:
        super().__init__()
        self.linear = Linear(weight_VH)

    def forward(self, x_RH: torch.Tensor) -> torch.Tensor:
        """[R, H] to fp32 [R, V]."""
        logits_RV: torch.Tensor = self.linear(x_RH)
        return logits_RV.float()
