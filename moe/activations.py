"""The gated activation of the experts, in plain torch."""

import torch

from moe.config import Activation


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Elementwise `g * sigmoid(alpha * g) * (u + beta)`; gate is clamped from above only, up from both sides."""
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    if activation.alpha == 1.0:
        gated = torch.nn.functional.silu(gate)
    else:
        gated = gate * torch.sigmoid(activation.alpha * gate)
    return gated * (up + activation.beta if activation.beta else up)
