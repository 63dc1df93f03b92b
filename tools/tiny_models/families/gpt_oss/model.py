"""GPT-OSS in plain torch for training: forward pass on packed sequences, all experts as one wide layer.

Weights are a dict with the names and layouts of the published files; expert weights are [E, rows, K], unpacked.
Letters: B sequences, L positions, H hidden, Q query heads, G kv heads, D head size, E experts, I expert width, T = B*L.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny_models.attend import Attend
from tools.tiny_models.families.base import Weights, layer_weights, rms_norm

EXPERT_WEIGHTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the forward pass needs of config.json."""

    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    window: int
    theta: float
    rope: dict[str, Any]
    eps: float
    limit: float

    @classmethod
    def load(cls, path: Path) -> Shape:
        raw = json.loads(path.read_text())
        return cls(
            vocab=raw["vocab_size"], hidden=raw["hidden_size"], inner=raw["intermediate_size"],
            layers=raw["num_hidden_layers"], heads=raw["num_attention_heads"], kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"], experts=raw["num_local_experts"], top_k=raw["num_experts_per_tok"],
            window=raw["sliding_window"], theta=raw["rope_theta"], rope=raw["rope_scaling"], eps=raw["rms_norm_eps"],
            limit=raw["swiglu_limit"],
        )  # fmt: skip

    @property
    def key_dim(self) -> int:
        return self.head_dim

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0


def init_weights(shape: Shape, seed: int = 0) -> Weights:
    """Fresh fp32 weights: scaled normals, output projections smaller with depth, everything else zero or one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float) -> Tensor:
        return torch.randn(*size, generator=generator) * std

    h, i, e = shape.hidden, shape.inner, shape.experts
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    std = h**-0.5
    out = std / math.sqrt(2 * shape.layers)
    w: Weights = {"model.embed_tokens.weight": normal(shape.vocab, h, std=0.3)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        w[at + "input_layernorm.weight"] = torch.ones(h)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            w[at + f"self_attn.{name}_proj.weight"] = normal(rows, h, std=std)
            w[at + f"self_attn.{name}_proj.bias"] = torch.zeros(rows)
        w[at + "self_attn.o_proj.weight"] = normal(h, q, std=out)
        w[at + "self_attn.o_proj.bias"] = torch.zeros(h)
        w[at + "self_attn.sinks"] = torch.zeros(shape.heads)
        w[at + "post_attention_layernorm.weight"] = torch.ones(h)
        w[at + "mlp.router.weight"] = normal(e, h, std=std)
        w[at + "mlp.router.bias"] = torch.zeros(e)
        w[at + "mlp.experts.gate_up_proj"] = normal(e, 2 * i, h, std=std)
        w[at + "mlp.experts.gate_up_proj_bias"] = torch.zeros(e, 2 * i)
        w[at + "mlp.experts.down_proj"] = normal(e, h, i, std=out)
        w[at + "mlp.experts.down_proj_bias"] = torch.zeros(e, h)
    w["model.norm.weight"] = torch.ones(h)
    w["lm_head.weight"] = normal(shape.vocab, h, std=std)
    return w


def rope_tables(shape: Shape, length: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin [length, D/2] of YaRN without truncation, its attention factor included."""
    d, rope = shape.head_dim, shape.rope
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    index = torch.arange(d // 2, dtype=torch.float32)
    plain = shape.theta ** (-2 * index / d)

    def dimension(turns: float) -> float:
        return d * math.log(original / (2 * math.pi * turns)) / (2 * math.log(shape.theta))

    low, high = max(dimension(rope["beta_fast"]), 0), min(dimension(rope["beta_slow"]), d - 1)
    ramp = ((index - low) / (high - low)).clamp(0, 1)
    inverse = plain * (1 - ramp) + plain / factor * ramp
    angle = torch.arange(length, dtype=torch.float32)[:, None] * inverse
    scale = 0.1 * math.log(factor) + 1
    return (angle.cos() * scale).to(device), (angle.sin() * scale).to(device)


def rotate(x_BNLD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_BNLD.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BNLD.dtype)


def attention(shape: Shape, w: Weights, x_BLH: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
    """Self-attention of one layer; rope holds cos and sin, each [B or 1, 1, L, D/2]."""

    def heads(name: str) -> Tensor:
        out = F.linear(x_BLH, w[f"{name}.weight"], w[f"{name}.bias"])
        return out.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)

    query, key, value = heads("q_proj"), heads("k_proj"), heads("v_proj")
    out = attend(rotate(query, *rope), rotate(key, *rope), value, w["sinks"].float())
    return F.linear(out.transpose(1, 2).flatten(2), w["o_proj.weight"], w["o_proj.bias"])


def experts(shape: Shape, w: Weights, x_TH: Tensor, router_in_TH: Tensor) -> tuple[Tensor, Tensor]:
    """The MoE layer and its load-balance loss. Every expert runs; those not chosen get weight zero."""
    logits_TE = F.linear(router_in_TH.float(), w["router.weight"].float(), w["router.bias"].float())
    top, chosen = logits_TE.topk(shape.top_k, dim=-1)
    weights_TE = torch.zeros_like(logits_TE).scatter(1, chosen, top.softmax(-1))
    used_E = (weights_TE > 0).float().mean(0).detach()
    balance = shape.experts * (used_E / shape.top_k * logits_TE.softmax(-1).mean(0)).sum()

    gate_up = F.linear(x_TH, w["experts.gate_up_proj"].flatten(0, 1), w["experts.gate_up_proj_bias"].flatten())
    gate, up = gate_up.unflatten(-1, (shape.experts, shape.inner, 2)).float().unbind(-1)
    gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit)
    act_TEI = gate * torch.sigmoid(1.702 * gate) * (up + 1) * weights_TE[..., None]
    down = w["experts.down_proj"].transpose(0, 1).flatten(1)  # [H, E*I]: one product also sums over the experts
    out = F.linear(act_TEI.to(x_TH.dtype).flatten(1), down)
    return out + weights_TE.to(x_TH.dtype) @ w["experts.down_proj_bias"], balance


def part(weights: Weights, prefix: str, dtype: torch.dtype) -> Weights:
    """The tensors under a prefix, rounded to the dtype that the file (bf16) or the master (fp32) holds."""
    return {name.removeprefix(prefix): value.to(dtype) for name, value in weights.items() if name.startswith(prefix)}


def block(
    shape: Shape, w: Weights, x_BLH: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """One decoder layer on the fp32 residual stream; `w` holds this layer's tensors only."""
    mine = {name: value.to(dtype) for name, value in w.items()}
    normed = rms_norm(x_BLH, mine["input_layernorm.weight"].float(), shape.eps).to(dtype)
    x_BLH = x_BLH + attention(shape, part(mine, "self_attn.", dtype), normed, rope, attend).float()
    normed = rms_norm(x_BLH, mine["post_attention_layernorm.weight"].float(), shape.eps).to(dtype).flatten(0, 1)
    out_TH, balance = experts(shape, part(mine, "mlp.", dtype), normed, normed)
    return x_BLH + out_TH.float().view_as(x_BLH), balance


def hidden_states(
    shape: Shape, weights: Weights, ids_BL: Tensor, rope: tuple[Tensor, Tensor], attends: Callable[[int], Attend],
    dtype: torch.dtype = torch.float32, run_block: Callable[..., tuple[Tensor, Tensor]] = block,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The normed states [B, L, H] before the head and the mean load-balance loss; run_block may be compiled."""
    x_BLH = F.embedding(ids_BL, weights["model.embed_tokens.weight"].to(dtype)).float()
    total = x_BLH.new_zeros(())
    for layer in range(shape.layers):
        x_BLH, balance = run_block(shape, layer_weights(weights, layer), x_BLH, rope, attends(layer), dtype)
        total = total + balance
    final = rms_norm(x_BLH, weights["model.norm.weight"].to(dtype).float(), shape.eps).to(dtype)
    return final, total / shape.layers
