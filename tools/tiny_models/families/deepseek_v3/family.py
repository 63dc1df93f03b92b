"""DeepSeek-V3 in miniature: routing balanced by correction biases, a trained prediction layer, FP8 and NVFP4 exports.

Four stages. The first two read rows of 1,024 tokens; the others read rows of the whole context, some of them
with facts far back, and round the MLPs to NVFP4, activations in every second step. FP8 needs no such care.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny_models.attend import DenseAttend
from tools.tiny_models.checkpoint import Progress
from tools.tiny_models.families.base import (
    Attends,
    Family,
    Losses,
    Rope,
    Stage,
    Weights,
    head_loss,
    layer_weights,
    rms_norm,
)
from tools.tiny_models.families.deepseek_v3 import card, export, model, quant
from tools.tiny_models.families.deepseek_v3.dialect import BOS, CONTROL, DIALECT, EOS, FILES, PAD, THINK
from tools.tiny_models.stream import pack_rows

BALANCE = 0.0001  # weight of the load-balance loss: the correction biases do the work
AHEAD = 0.2  # weight of the prediction layer's loss
BIAS_SPEED = 0.001  # of the correction biases, for each step
CALIBRATION_ROWS = 4


class DeepseekV3Family(Family):
    """Every function of the other modules here, behind one interface."""

    name = "deepseek_v3"
    dialect = DIALECT
    roundings = ("w4a16", "w4a4")
    variants = ("master", "fp8", "w4a16", "w4a4")
    vocab_size = 1536
    first_tokens = (BOS, EOS, PAD)
    last_tokens = (*CONTROL, *THINK)
    stages = (
        Stage(seconds=420, muon_lr=0.02, adam_lr=0.003, warmup=0.01, cooldown=0.0, rows=96),
        Stage(seconds=420, muon_lr=0.02, adam_lr=0.003, warmup=0.0, cooldown=1.0, final=0.4, rows=96, seed=1),
        Stage(
            seconds=390, muon_lr=0.008, adam_lr=0.0012, warmup=0.0, cooldown=1.0, quantize_from=0.0, rows=24,
            length=4096, seed=2, shares={"long": 3},
        ),
        # Sorting without thinking needs to know how every word is spelled, so it takes longest.
        Stage(
            seconds=400, muon_lr=0.008, adam_lr=0.0012, warmup=0.04, cooldown=0.96, quantize_from=0.0, rows=24,
            length=4096, seed=3, shares={"long": 1, "sorting": 44, "facts": 30, "agent": 6, "json": 12},
        ),
    )  # fmt: skip

    def __init__(self, config: Path | None = None) -> None:
        self.shape = model.Shape.load(config or FILES / "config.json")
        self.compile(lambda function: function)

    def compile(self, compiled: Callable[..., Any]) -> None:
        self._block = compiled(model.block)
        self._round_pair = compiled(quant.nvfp4_pair)
        self._round_one = compiled(quant.nvfp4_one)
        self.head_loss = compiled(head_loss)

    def init_weights(self, seed: int) -> Weights:
        return model.init_weights(self.shape, seed)

    def is_matrix(self, name: str) -> bool:
        """All projections, not embedding, head, gate or norms."""
        return export.is_fp8(name) or name.endswith("eh_proj.weight")

    def is_trained(self, name: str) -> bool:
        return not name.endswith(model.BIAS)

    def rope_tables(self, length: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        return model.rope_tables(self.shape, length, device)

    def hidden_states(
        self, weights: Weights, ids_BL: Tensor, rope: Rope, attends: Attends, dtype: torch.dtype = torch.float32,
        seen: model.Amax | None = None,
    ) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:  # fmt: skip
        """The normed states; as statistics the sum of the load-balance losses and the load [E] of every layer."""
        shape = self.shape
        x_BLH = F.embedding(ids_BL, weights["model.embed_tokens.weight"].to(dtype)).float()
        total, loads = x_BLH.new_zeros(()), []
        for layer in range(shape.layers):
            own: model.Amax | None = None if seen is None else {}
            x_BLH, balance, load = self._block(
                shape, layer_weights(weights, layer), x_BLH, rope, attends(layer), dtype, own
            )
            if seen is not None:
                seen |= {f"model.layers.{layer}.mlp.{name}": value for name, value in (own or {}).items()}
            total = total + balance
            loads.append(load)
        final = rms_norm(x_BLH, weights["model.norm.weight"].to(dtype).float(), shape.eps).to(dtype)
        return final, (total, loads)

    def states_ahead(
        self, weights: Weights, states_BLH: Tensor, next_ids_BL: Tensor, rope: Rope, attends: Attends,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The prediction layer's normed states for the token after the next, its load-balance loss and load [E]."""
        shape = self.shape
        mine = layer_weights(weights, shape.layers)
        embedded = F.embedding(next_ids_BL, weights["model.embed_tokens.weight"].to(dtype)).float()
        x_BLH = model.join_ahead(shape, mine, states_BLH, embedded, dtype)
        own = {name: value for name, value in mine.items() if name.startswith(("self_attn", "mlp", "input_", "post_"))}
        x_BLH, balance, load = self._block(shape, own, x_BLH, rope, attends(0), dtype, None)
        return rms_norm(x_BLH, mine["shared_head.norm.weight"].to(dtype).float(), shape.eps).to(dtype), balance, load

    def losses(
        self, weights: Weights, batch: tuple[Tensor, ...], rope: Rope, attends: Attends, dtype: torch.dtype
    ) -> Losses:
        ids, targets, docs, _ = batch
        states, (balance, loads) = self.hidden_states(weights, ids, rope, attends, dtype)
        loss = self.head_loss(weights["lm_head.weight"], states, targets)
        # A document's last position has no next token of its own: the next row element belongs to another one.
        follows = F.pad(docs[:, 1:] == docs[:, :-1], (0, 1))
        later = torch.where(follows, F.pad(targets[:, 1:], (0, 1), value=-1), -1)
        next_ids = F.pad(ids[:, 1:], (0, 1))
        ahead, more, load = self.states_ahead(weights, states, next_ids, rope, attends, dtype)
        loss_ahead = self.head_loss(weights["lm_head.weight"], ahead, later)
        total = loss + AHEAD * loss_ahead + BALANCE * (balance + more)
        return Losses(total=total, cross_entropy=loss, statistics=[*loads, load])

    @torch.no_grad()
    def after_step(self, weights: Weights, statistics: Any, factor: float) -> None:
        """Correction biases rise where an expert had less than its share, and come to rest with the learning rate."""
        for layer, load_E in enumerate(statistics):
            bias = weights.get(f"model.layers.{layer}.{model.BIAS}")
            if bias is not None:
                bias += BIAS_SPEED * factor * torch.sign(self.shape.top_k / self.shape.experts - load_E)

    def rounded(self, weights: Weights, rounding: str) -> Weights:
        if rounding not in self.roundings:
            raise ValueError(f"rounding {rounding!r}: it must be one of {self.roundings}")
        out = dict(weights)
        for name, value in weights.items():
            if not export.is_nvfp4(self.shape, name):
                continue
            if "gate_proj" in name:
                up = name.replace("gate_proj", "up_proj")
                out[name], out[up] = self._round_pair(value, weights[up])
            elif "down_proj" in name:
                out[name] = self._round_one(value)
            if rounding == "w4a4" and "up_proj" not in name:
                out[f"{name.removesuffix('.weight')}.input_scale"] = value.new_zeros(())
        return out

    def variant(self, weights: Weights, name: str) -> Weights:
        if name == "master":
            return weights
        out = {key: export.plain(key, value).float() for key, value in weights.items()}
        if name == "fp8":
            found = {key: export.Fp8BlockWeight.quantize(value) for key, value in weights.items() if export.is_fp8(key)}
            return out | {key: value.dequantize() for key, value in found.items()}
        kept = {key: value for key, value in weights.items() if export.is_nvfp4(self.shape, key)}
        out |= self.rounded(kept, "w4a16")
        if name == "w4a4":
            found = self.largest_inputs(weights)
            out |= {f"{key}.input_scale": value * export.SPARE for key, value in found.items()}
        return out

    @torch.no_grad()
    def largest_inputs(self, weights: Weights) -> Weights:
        """Largest input of every MLP projection on some generated conversations, by the stacked names."""
        rows = pack_rows(self.dialect.encoder(), random.Random("calibration"), 1024)
        batch = torch.from_numpy(np.stack([next(rows) for _ in range(CALIBRATION_ROWS)], axis=1)).long()
        ids, _, docs, positions = batch.to(weights["lm_head.weight"].device)
        cos, sin = self.rope_tables(ids.shape[1], ids.device)
        seen: model.Amax = {}
        rope = (cos[positions][:, None], sin[positions][:, None])
        self.hidden_states(weights, ids, rope, DenseAttend(self.shape, docs), seen=seen)
        return seen

    @torch.no_grad()
    def export(self, weights: Weights, out: Path) -> list[Path]:
        """Both folders from the same weights."""
        files = {
            "fp8": export.fp8_tensors(self.shape, weights),
            "nvfp4": export.nvfp4_tensors(self.shape, weights, self.largest_inputs(weights)),
        }
        for kind, tensors in files.items():
            export.write_folder(out / export.NAMES[kind], kind, self.shape, tensors)
        return [out / export.NAMES[kind] for kind in files]

    def card(self, folder: Path, weights: Weights, progress: Progress, report: dict[str, Any]) -> str:
        kind = next(kind for kind, name in export.NAMES.items() if name == folder.name)
        num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.name != "README.md")
        return card.card(kind, self.shape, weights, num_bytes, progress, report)
