"""The gated activation of the experts, in plain torch."""

import torch

from moe.config import Activation


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Elementwise `g * sigmoid(alpha * g) * (u + beta)`. Clamps the gate from above only, and up on both sides."""
    if activation.limit is not None:
        gate = gate.clamp_max(activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    if activation.beta:
        up = up + activation.beta
    if activation.alpha == 1.0:
        return torch.nn.functional.silu(gate).mul_(up)
    return (gate * activation.alpha).sigmoid_().mul_(gate).mul_(up)
