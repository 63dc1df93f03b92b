"""`Family`: what trainer, evaluation and export need of a model family; `Stage`: one run of a training recipe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny_models.attend import Attend
from tools.tiny_models.dialect import Dialect

if TYPE_CHECKING:
    from tools.tiny_models.checkpoint import Progress

Weights = dict[str, Tensor]
Attends = Callable[[int], Attend]
Rope = tuple[Tensor, Tensor]  # cos and sin, each [B or 1, 1, L, D/2]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One command's worth of training. Rates: up over `warmup`, constant, then linear to `final` over `cooldown`."""

    seconds: float  # of training, without compiling
    muon_lr: float
    adam_lr: float
    warmup: float  # these four are shares of the stage
    cooldown: float
    quantize_from: float = 1.0  # weights are rounded as in the file from here on
    final: float = 0.0  # the last factor of both rates
    decay: float = 0.05  # weight decay of the matrices
    rows: int = 48
    length: int = 1024
    seed: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)  # other weights of the generators, see data/mix.py

    def factor(self, progress: float) -> float:
        """Of the learning rates, at a share of the stage."""
        rising = progress / self.warmup if self.warmup else 1.0
        falling = self.final + (1 - self.final) * (1 - progress) / self.cooldown if self.cooldown else 1.0
        return max(0.0, min(1.0, rising, falling))


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Of one batch: what is minimized, the cross-entropy that it contains, and what `Family.after_step` needs."""

    total: Tensor
    cross_entropy: Tensor
    statistics: Any = None


class Family(ABC):
    """One architecture with its sizes, dialect and recipe. Weights are a dict of fp32 tensors with published names."""

    name: str
    dialect: Dialect
    stages: tuple[Stage, ...]
    roundings: tuple[str, ...]  # steps take these in turn once a stage rounds
    variants: tuple[str, ...]  # evaluated; the first is "master", the unrounded weights
    vocab_size: int
    first_tokens: tuple[str, ...]  # special tokens in front of the vocabulary, and behind it
    last_tokens: tuple[str, ...]
    shape: Any

    @abstractmethod
    def init_weights(self, seed: int) -> Weights:
        """Fresh fp32 weights."""

    @abstractmethod
    def is_matrix(self, name: str) -> bool:
        """True for what Muon updates; AdamW has the rest."""

    def is_trained(self, name: str) -> bool:
        """False for tensors without gradients."""
        del name
        return True

    @abstractmethod
    def rope_tables(self, length: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """cos and sin [length, D/2]."""

    @abstractmethod
    def hidden_states(
        self, weights: Weights, ids_BL: Tensor, rope: Rope, attends: Attends, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Any]:
        """The normed states [B, L, H] before the head, and the family's statistics."""

    @abstractmethod
    def losses(
        self, weights: Weights, batch: tuple[Tensor, ...], rope: Rope, attends: Attends, dtype: torch.dtype
    ) -> Losses:
        """Of ids, targets, document numbers and positions, each [B, L]."""

    def after_step(self, weights: Weights, statistics: Any, factor: float) -> None:
        """Changes that are not gradient descent; `factor` is that of the learning rates."""
        del weights, statistics, factor

    @abstractmethod
    def rounded(self, weights: Weights, rounding: str) -> Weights:
        """The weights of a training step, rounded with straight-through gradients."""

    @abstractmethod
    def variant(self, weights: Weights, name: str) -> Weights:
        """fp32 weights with the values that one exported file holds."""

    @abstractmethod
    def export(self, weights: Weights, out: Path) -> list[Path]:
        """Writes the model folders below `out`."""

    def card(self, folder: Path, weights: Weights, progress: Progress, report: dict[str, Any]) -> str:
        """README.md of an exported folder. Raises ValueError where it is written by hand, or the report lacks some."""
        raise ValueError(f"--report: the card of {folder.name} is written by hand")

    def read(self, folder: Path) -> Weights:
        """fp32 weights of an exported folder, rounded as they are. Raises ValueError where a family cannot do that."""
        raise ValueError(f"--init {folder}: {self.name} goes on from checkpoints only")

    def compile(self, compiled: Callable[..., Any]) -> None:
        """Replaces the hot functions by compiled ones."""
        self.head_loss = compiled(head_loss)

    head_loss: Callable[[Tensor, Tensor, Tensor], Tensor]


def head_loss(head: Tensor, states: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the trained positions; half of the positions hold all of them, nearly always."""
    flat = targets.flatten()
    room = flat.numel() // 2
    chosen = torch.argsort((flat < 0).to(torch.uint8), stable=True)[:room]
    scores = F.linear(states.flatten(0, 1)[chosen], head.to(states.dtype)).float()
    wanted = flat[chosen]
    # Rows of the last stages may hold one long prompt each, and then only few targets: never divide by zero.
    total = F.cross_entropy(scores, wanted, ignore_index=-1, reduction="sum")
    return total / (wanted >= 0).sum().clamp(min=1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def layer_weights(weights: Weights, layer: int) -> Weights:
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def logits(weights: Weights, states: Tensor) -> Tensor:
    return F.linear(states, weights["lm_head.weight"].to(states.dtype))
