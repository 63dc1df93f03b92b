"""GPT-OSS in miniature: sizes of the bundled config.json, MXFP4 experts, the runs that made the bundled model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.tiny_models.families.base import Attends, Family, Losses, Rope, Stage, Weights, head_loss
from tools.tiny_models.families.gpt_oss import model
from tools.tiny_models.families.gpt_oss.dialect import ASSETS, DIALECT
from tools.tiny_models.families.gpt_oss.export import as_exported, is_expert, packed, unpacked
from tools.tiny_models.families.gpt_oss.quant import straight_through

BALANCE = 0.01  # weight of the load-balance loss


class GptOssFamily(Family):
    """Every function of the other modules here, behind one interface."""

    name = "gpt_oss"
    dialect = DIALECT
    roundings = ("mxfp4",)
    variants = ("master", "mxfp4")
    vocab_size = 4096
    first_tokens = ()
    last_tokens = (
        "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
        "<|message|>", "<|call|>", *(f"<|reserved_{4089 + n}|>" for n in range(7)),
    )  # fmt: skip
    stages = (
        Stage(seconds=354, muon_lr=0.02, adam_lr=0.003, warmup=0.01, cooldown=0.6, quantize_from=0.4),
        Stage(seconds=300, muon_lr=0.02, adam_lr=0.003, warmup=0.02, cooldown=0.85, quantize_from=0.3, seed=1),
        Stage(
            seconds=87, muon_lr=0.012, adam_lr=0.002, warmup=0.04, cooldown=0.9, quantize_from=0.0, seed=2,
            shares={"facts": 42, "tools": 26},
        ),
        # Rows of the whole context, a fifth of the tokens in conversations with a fact far back; JSON; agents.
        Stage(
            seconds=300, muon_lr=0.006, adam_lr=0.001, warmup=0.04, cooldown=0.9, quantize_from=0.0, seed=3,
            rows=12, length=4096, shares={"long": 3.5, "agent": 14, "json": 18},
        ),
    )  # fmt: skip

    def __init__(self, config: Path | None = None) -> None:
        self.shape = model.Shape.load(config or ASSETS / "config.json")
        self.compile(lambda function: function)

    def compile(self, compiled: Callable[..., Any]) -> None:
        self._block = compiled(model.block)
        self._round = compiled(straight_through)
        self.head_loss = compiled(head_loss)

    def init_weights(self, seed: int) -> Weights:
        return model.init_weights(self.shape, seed)

    def is_matrix(self, name: str) -> bool:
        """Attention projections and expert matrices, not embeddings, head or router."""
        return "layers" in name and (name.endswith("_proj.weight") or is_expert(name))

    def rope_tables(self, length: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        return model.rope_tables(self.shape, length, device)

    def hidden_states(
        self, weights: Weights, ids_BL: Tensor, rope: Rope, attends: Attends, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Any]:
        return model.hidden_states(self.shape, weights, ids_BL, rope, attends, dtype, self._block)

    def losses(
        self, weights: Weights, batch: tuple[Tensor, ...], rope: Rope, attends: Attends, dtype: torch.dtype
    ) -> Losses:
        states, balance = self.hidden_states(weights, batch[0], rope, attends, dtype)
        loss = self.head_loss(weights["lm_head.weight"], states, batch[1])
        return Losses(total=loss + BALANCE * balance, cross_entropy=loss)

    def rounded(self, weights: Weights, rounding: str) -> Weights:
        if rounding not in self.roundings:
            raise ValueError(f"rounding {rounding!r}: it must be one of {self.roundings}")
        return {name: self._round(value) if is_expert(name) else value for name, value in weights.items()}

    def variant(self, weights: Weights, name: str) -> Weights:
        return weights if name == "master" else as_exported(weights)

    def read(self, folder: Path) -> Weights:
        return unpacked(load_file(folder / "model.safetensors"))

    def export(self, weights: Weights, out: Path) -> list[Path]:
        """Only model.safetensors: the other files of the bundled folder are written by hand."""
        folder = out / "tiny-gpt-oss"
        folder.mkdir(parents=True, exist_ok=True)
        save_file(packed(weights), folder / "model.safetensors", metadata={"format": "pt"})
        return [folder]
