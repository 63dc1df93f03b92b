"""RMS normalisation, computed in fp32 whatever the model's dtype."""

import torch
from torch import nn
from torch.nn.functional import rms_norm

from model.fused import fused_kernels
from model.layer import Layer
from moe.group import PartialSum

# Up to here the length of each row, two operators, beats `rms_norm`, which on a CPU is made of eight.
_MAX_LENGTH_ROWS = 16


class RmsNorm(Layer):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis; the weight multiplies in fp32, the cast comes last."""

    def __init__(self, weight_H: torch.Tensor, eps: float) -> None:
        super().__init__()
        size = weight_H.numel()
        self.weight = nn.Parameter(weight_H.float(), requires_grad=False)
        self.eps = eps
        # For the length: x / hypot(|x|, sqrt(H * eps)) * (weight * sqrt(H)).
        self.scaled_weight = nn.Parameter(self.weight * size**0.5, requires_grad=False)
        root_eps = torch.full((1, 1), (size * eps) ** 0.5, device=weight_H.device)
        self.root_eps = nn.Parameter(root_eps, requires_grad=False)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H] in the dtype of `x`."""
        if (kernels := fused_kernels(x_TH.device)) is not None:
            normed_TH: torch.Tensor = kernels.rms_norm(x_TH, self.weight, self.eps)
            return normed_TH
        if x_TH.dtype == torch.float32 and x_TH.shape[0] <= _MAX_LENGTH_ROWS and x_TH.device.type == "cpu":
            lengths_T1 = torch.linalg.vector_norm(x_TH, dim=-1, keepdim=True)
            return x_TH.div(torch.hypot(lengths_T1, self.root_eps)).mul_(self.scaled_weight)
        weight = self.weight
        return rms_norm(x_TH.float(), weight.shape, weight, self.eps).to(x_TH.dtype)

    def add(self, x_TH: torch.Tensor | None, delta_TH: torch.Tensor | PartialSum) -> tuple[torch.Tensor, torch.Tensor]:
        """`x + delta`, or `delta` where there is no `x`, and the norm of it.

        A sum over ranks is added up, by the same kernel where the group has one.
        """
        if isinstance(delta_TH, PartialSum):
            both = delta_TH.group.add_norm(x_TH, delta_TH, self.weight, self.eps)
            if both is not None:
                return both
            delta_TH = delta_TH.added_up()
        if x_TH is None:
            return delta_TH, self(delta_TH)
        if (kernels := fused_kernels(x_TH.device)) is not None:
            pair: tuple[torch.Tensor, torch.Tensor] = kernels.add_rms_norm(x_TH, delta_TH, self.weight, self.eps)
            return pair
        x_TH = x_TH + delta_TH
        return x_TH, self(x_TH)
