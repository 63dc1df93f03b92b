"""RMS normalisation, computed in fp32 whatever the model's dtype."""

import torch
from torch import nn
from torch.nn.functional import rms_norm


class RmsNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis; the weight multiplies in fp32, the cast comes last."""

    def __init__(self, weight_H: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_H.float(), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., H] in the dtype of `x`."""
        weight = self.weight
        return rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)  # the casts cost nothing in fp32
