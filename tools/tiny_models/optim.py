"""Muon for the matrices, AdamW for the rest, with one learning-rate factor for both."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from tools.tiny_models.model import Weights


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """Replaces the singular values of each matrix [..., rows, columns] by about one (Newton-Schulz iteration)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-1, -2) if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


def is_matrix(name: str) -> bool:
    """What Muon updates: attention projections and expert matrices, not embeddings, head or router."""
    return "layers" in name and (name.endswith("_proj.weight") or name.endswith(("gate_up_proj", "down_proj")))


class Optimizer:
    """Updates the weights in place. Matrices of one shape are orthogonalized together."""

    def __init__(self, weights: Weights, *, muon_lr: float, adam_lr: float, decay: float) -> None:
        self._muon_lr, self._decay = muon_lr, decay
        groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for name, weight in weights.items():
            if is_matrix(name):
                groups[tuple(weight.shape)].append(weight)
        self._groups = list(groups.values())
        self._momenta = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self._groups]
        rest = [weight for name, weight in weights.items() if not is_matrix(name)]
        self._adam = torch.optim.AdamW(
            rest, lr=adam_lr, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0, fused=rest[0].is_cuda
        )
        self._adam_lr = adam_lr

    @torch.no_grad()
    def step(self, factor: float, momentum: float = 0.95) -> None:
        """One update; `factor` scales both learning rates."""
        for group in self._adam.param_groups:
            group["lr"] = self._adam_lr * factor
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        rate = self._muon_lr * factor
        for weights, momenta in zip(self._groups, self._momenta, strict=True):
            gradients = torch.stack([weight.grad for weight in weights if weight.grad is not None])
            momenta.lerp_(gradients, 1 - momentum)
            update = orthogonalize(gradients.lerp_(momenta, momentum))
            size = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            torch._foreach_mul_(weights, 1 - rate * self._decay)
            torch._foreach_add_(weights, list((update * (-rate * size)).to(weights[0].dtype).unbind(0)))
            for weight in weights:
                weight.grad = None
