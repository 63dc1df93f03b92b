"""Muon for the matrices, AdamW for the rest, with one learning-rate factor for both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from tools.tiny_models.families.base import Weights

MUON, ADAM = "muon.", "adam."


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """Replaces the singular values of each matrix [..., rows, columns] by about one (Newton-Schulz iteration)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.to(torch.bfloat16) if g.is_cuda else g  # bf16 is slow on CPUs
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-1, -2) if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


class Optimizer:
    """Updates the weights in place. Matrices of one shape are orthogonalized together."""

    def __init__(
        self, weights: Weights, is_matrix: Callable[[str], bool], *, muon_lr: float, adam_lr: float, decay: float
    ) -> None:
        self._muon_lr, self._decay = muon_lr, decay
        groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, weight in weights.items():
            if is_matrix(name):
                groups[tuple(weight.shape)].append(name)
        self._weights = weights
        self._groups = list(groups.values())
        device = next(iter(weights.values())).device
        self._momenta = [torch.zeros(len(names), *size, device=device) for size, names in groups.items()]
        self._rest = [name for name in weights if not is_matrix(name)]
        rest = [weights[name] for name in self._rest]
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
        for names, momenta in zip(self._groups, self._momenta, strict=True):
            weights = [self._weights[name] for name in names]
            gradients = torch.stack([weight.grad for weight in weights if weight.grad is not None])
            momenta.lerp_(gradients, 1 - momentum)
            update = orthogonalize(gradients.lerp_(momenta, momentum))
            size = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            torch._foreach_mul_(weights, 1 - rate * self._decay)
            torch._foreach_add_(weights, list((update * (-rate * size)).to(weights[0].dtype).unbind(0)))
            for weight in weights:
                weight.grad = None

    def state(self) -> Weights:
        """All momenta by the name of their weight; those of the matrices in bf16, which halves a checkpoint."""
        found = {}
        for names, momenta in zip(self._groups, self._momenta, strict=True):
            for name, momentum in zip(names, momenta.to(torch.bfloat16), strict=True):
                found[f"{MUON}{name}"] = momentum
        for name in self._rest:
            for key, value in self._adam.state.get(self._weights[name], {}).items():
                found[f"{ADAM}{key}.{name}"] = value
        return found

    def load(self, state: Weights) -> None:
        """Takes over what `state` gave. Raises KeyError where a momentum is missing."""
        for names, momenta in zip(self._groups, self._momenta, strict=True):
            momenta.copy_(torch.stack([state[f"{MUON}{name}"].float() for name in names]))
        for name in self._rest:
            weight = self._weights[name]
            self._adam.state[weight] = {
                "step": state[f"{ADAM}step.{name}"].to(weight.device if weight.is_cuda else "cpu"),
                "exp_avg": state[f"{ADAM}exp_avg.{name}"].to(weight.device),
                "exp_avg_sq": state[f"{ADAM}exp_avg_sq.{name}"].to(weight.device),
            }
