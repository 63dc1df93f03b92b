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
        # On a GPU the product is written as the fp32 sum that it is, which spares a pass over the logits.
        is_summed_in_fp32 = weight_VH.device.type == "cuda" and weight_VH.dtype == torch.bfloat16
        self._weight_HV = weight_VH.t() if is_summed_in_fp32 else None

    def forward(self, x_RH: torch.Tensor, out_RV: torch.Tensor | None = None) -> torch.Tensor:
        """[R, H] to fp32 [R, V], which is `out` if one is given."""
        if self._weight_HV is not None and x_RH.dtype == torch.bfloat16:
            return torch.mm(x_RH, self._weight_HV, out_dtype=torch.float32, out=out_RV)
        logits_RV: torch.Tensor = self.linear(x_RH)
        return logits_RV.float() if out_RV is None else out_RV.copy_(logits_RV)
