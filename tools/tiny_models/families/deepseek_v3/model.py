"""DeepSeek-V3 in plain torch for training, with the prediction layer (MTP) behind the model's own.

Latent attention has its expanded form, and all experts are one wide layer.

Weights are a dict with the published names; the experts of a layer are stacked: `mlp.experts.gate_proj` is [E, I, H].
The layer numbered `layers` is the prediction layer. It reads the normed state of position i and the embedding of token
i + 1, at position i, and predicts token i + 2; embedding and head are the model's.
Letters: B sequences, L positions, H hidden, Q query heads, D key dims, E experts, I expert width, T = B*L.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny_models.attend import Attend
from tools.tiny_models.families.base import Rope, Weights, rms_norm
from tools.tiny_models.families.deepseek_v3.quant import rounded_inputs

BIAS = "mlp.gate.e_score_correction_bias"
LATENT_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps says
Amax = dict[str, Tensor]  # largest input of each quantized projection, by its name within the layer


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the forward pass needs of config.json."""

    vocab: int
    hidden: int
    dense_inner: int
    inner: int
    layers: int
    num_dense: int
    heads: int
    nope: int
    rope_dim: int
    value_dim: int
    query_rank: int
    kv_rank: int
    experts: int
    groups: int
    kept_groups: int
    top_k: int
    routed_scale: float
    theta: float
    rope: dict[str, Any]
    eps: float
    window: int = 0

    @classmethod
    def load(cls, path: Path) -> Shape:
        raw = json.loads(path.read_text())
        return cls(
            vocab=raw["vocab_size"], hidden=raw["hidden_size"], dense_inner=raw["intermediate_size"],
            inner=raw["moe_intermediate_size"], layers=raw["num_hidden_layers"], num_dense=raw["first_k_dense_replace"],
            heads=raw["num_attention_heads"], nope=raw["qk_nope_head_dim"], rope_dim=raw["qk_rope_head_dim"],
            value_dim=raw["v_head_dim"], query_rank=raw["q_lora_rank"], kv_rank=raw["kv_lora_rank"],
            experts=raw["n_routed_experts"], groups=raw["n_group"], kept_groups=raw["topk_group"],
            top_k=raw["num_experts_per_tok"], routed_scale=raw["routed_scaling_factor"], theta=raw["rope_theta"],
            rope=raw["rope_scaling"], eps=raw["rms_norm_eps"],
        )  # fmt: skip

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def key_dim(self) -> int:
        return self.nope + self.rope_dim

    @property
    def scale(self) -> float:
        """YaRN's mscale counts twice: once for the query, once for the key."""
        return self.key_dim**-0.5 * (0.1 * self.rope["mscale_all_dim"] * math.log(self.rope["factor"]) + 1) ** 2

    def slides(self, layer: int) -> bool:
        del layer
        return False


def init_weights(shape: Shape, seed: int = 0) -> Weights:
    """Fresh fp32 weights: scaled normals, output projections smaller with depth, norms one, correction biases zero."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float) -> Tensor:
        return torch.randn(*size, generator=generator) * std

    h, e, i = shape.hidden, shape.experts, shape.inner
    std = h**-0.5
    out = std / math.sqrt(2 * shape.layers)
    w: Weights = {"model.embed_tokens.weight": normal(shape.vocab, h, std=0.3)}
    for layer in range(shape.layers + 1):
        at = f"model.layers.{layer}."
        if layer == shape.layers:
            w[at + "enorm.weight"], w[at + "hnorm.weight"] = torch.ones(h), torch.ones(h)
            w[at + "eh_proj.weight"] = normal(h, 2 * h, std=(2 * h) ** -0.5)
            w[at + "shared_head.norm.weight"] = torch.ones(h)
        w[at + "input_layernorm.weight"] = torch.ones(h)
        w[at + "self_attn.q_a_proj.weight"] = normal(shape.query_rank, h, std=std)
        w[at + "self_attn.q_a_layernorm.weight"] = torch.ones(shape.query_rank)
        rows = shape.heads * shape.key_dim
        w[at + "self_attn.q_b_proj.weight"] = normal(rows, shape.query_rank, std=shape.query_rank**-0.5)
        w[at + "self_attn.kv_a_proj_with_mqa.weight"] = normal(shape.kv_rank + shape.rope_dim, h, std=std)
        w[at + "self_attn.kv_a_layernorm.weight"] = torch.ones(shape.kv_rank)
        rows = shape.heads * (shape.nope + shape.value_dim)
        w[at + "self_attn.kv_b_proj.weight"] = normal(rows, shape.kv_rank, std=shape.kv_rank**-0.5)
        w[at + "self_attn.o_proj.weight"] = normal(h, shape.heads * shape.value_dim, std=out)
        w[at + "post_attention_layernorm.weight"] = torch.ones(h)
        if layer >= shape.num_dense:
            w[at + "mlp.gate.weight"] = normal(e, h, std=std)
            w[at + BIAS] = torch.zeros(e)
            for name, size, scale in (("gate", (e, i, h), std), ("up", (e, i, h), std), ("down", (e, h, i), out)):
                w[at + f"mlp.experts.{name}_proj"] = normal(*size, std=scale)
        prefix, width = ("mlp.", shape.dense_inner) if layer < shape.num_dense else ("mlp.shared_experts.", i)
        for name in ("gate", "up"):
            w[at + f"{prefix}{name}_proj.weight"] = normal(width, h, std=std)
        w[at + f"{prefix}down_proj.weight"] = normal(h, width, std=out)
    w["model.norm.weight"] = torch.ones(h)
    w["lm_head.weight"] = normal(shape.vocab, h, std=std)
    return w


def rope_tables(shape: Shape, length: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin [length, D/2] of YaRN; both mscales are equal, so cos and sin keep their size."""
    d, rope = shape.rope_dim, shape.rope
    if rope["mscale"] != rope["mscale_all_dim"]:
        raise ValueError(
            f"rope_scaling: mscale {rope['mscale']} and mscale_all_dim {rope['mscale_all_dim']} must agree"
        )
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    index = torch.arange(d // 2, dtype=torch.float32)
    plain = shape.theta ** (-2 * index / d)

    def dimension(turns: float) -> float:
        return d * math.log(original / (2 * math.pi * turns)) / (2 * math.log(shape.theta))

    low = max(math.floor(dimension(rope["beta_fast"])), 0)
    high = min(math.ceil(dimension(rope["beta_slow"])), d - 1)
    ramp = ((index - low) / (high - low)).clamp(0, 1)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * (plain * (1 - ramp) + plain / factor * ramp)
    return angle.cos().to(device), angle.sin().to(device)


def rotate(x_BNLD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns neighbouring pairs (2i, 2i + 1)."""
    first, second = x_BNLD.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.flatten(-2).to(x_BNLD.dtype)


def attention(shape: Shape, w: Weights, x_BLH: Tensor, rope: Rope, attend: Attend) -> Tensor:
    """Latent attention of one layer with keys and values expanded for each head."""
    dtype = x_BLH.dtype

    def heads(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"]).unflatten(-1, (shape.heads, -1)).transpose(1, 2)

    query = rms_norm(F.linear(x_BLH, w["q_a_proj.weight"]), w["q_a_layernorm.weight"].float(), LATENT_EPS).to(dtype)
    q_nope, q_rope = heads(query, "q_b_proj").split((shape.nope, shape.rope_dim), -1)
    latent, k_rope = F.linear(x_BLH, w["kv_a_proj_with_mqa.weight"]).split((shape.kv_rank, shape.rope_dim), -1)
    latent = rms_norm(latent, w["kv_a_layernorm.weight"].float(), LATENT_EPS).to(dtype)
    k_nope, value = heads(latent, "kv_b_proj").split((shape.nope, shape.value_dim), -1)
    k_rope = rotate(k_rope[:, None], *rope).expand(-1, shape.heads, -1, -1)
    key = torch.cat((k_nope, k_rope), -1)
    out = attend(torch.cat((q_nope, rotate(q_rope, *rope)), -1), key, value.contiguous(), None)
    return F.linear(out.transpose(1, 2).flatten(2), w["o_proj.weight"])


def route(shape: Shape, w: Weights, x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [T, E] of the chosen experts, zero for the others, and the scores [T, E], in fp32."""
    scores_TE = torch.sigmoid(F.linear(x_TH.float(), w["gate.weight"].float()))
    choice_TE = scores_TE.detach() + w["gate.e_score_correction_bias"].float()
    grouped = choice_TE.unflatten(-1, (shape.groups, -1))
    best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(best).scatter(1, best.topk(shape.kept_groups, dim=-1).indices, 1.0)
    choice_TE = grouped.masked_fill(kept[..., None] == 0, float("-inf")).flatten(1)
    chosen = choice_TE.topk(shape.top_k, dim=-1).indices
    top = scores_TE.gather(1, chosen)
    weights = top / (top.sum(-1, keepdim=True) + 1e-20) * shape.routed_scale
    return torch.zeros_like(scores_TE).scatter(1, chosen, weights), scores_TE


def swiglu(w: Weights, x: Tensor, name: str, seen: Amax | None) -> Tensor:
    """A dense MLP or the shared expert. Activations are rounded where `w` has their scales."""
    x = rounded_inputs(x, w.get(f"{name}gate_proj.input_scale"))
    act = F.silu(F.linear(x, w[f"{name}gate_proj.weight"])) * F.linear(x, w[f"{name}up_proj.weight"])
    if seen is not None:
        seen[f"{name}gate_proj"], seen[f"{name}down_proj"] = x.abs().amax().float(), act.abs().amax().float()
    return F.linear(rounded_inputs(act, w.get(f"{name}down_proj.input_scale")), w[f"{name}down_proj.weight"])


def experts(shape: Shape, w: Weights, x_TH: Tensor, weights_TE: Tensor, seen: Amax | None) -> Tensor:
    """The routed experts. Every one runs for every token; those not chosen get weight zero."""
    x_TH = rounded_inputs(x_TH, w.get("experts.gate_proj.input_scale"))
    gate = F.linear(x_TH, w["experts.gate_proj"].flatten(0, 1))
    up = F.linear(x_TH, w["experts.up_proj"].flatten(0, 1))
    act_TEI = (F.silu(gate) * up).unflatten(-1, (shape.experts, shape.inner))
    if seen is not None:
        seen["experts.gate_proj"] = x_TH.abs().amax().float()
        seen["experts.down_proj"] = (act_TEI * (weights_TE > 0)[..., None]).abs().amax((0, 2)).float()
    scale = w.get("experts.down_proj.input_scale")
    act_TEI = rounded_inputs(act_TEI, scale if scale is None or not scale.dim() else scale[:, None])
    down = w["experts.down_proj"].transpose(0, 1).flatten(1)  # [H, E*I]: one product also sums over the experts
    return F.linear((act_TEI * weights_TE[..., None].to(act_TEI.dtype)).flatten(1), down)


def balance_of(shape: Shape, weights_TE: Tensor, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
    """The load-balance loss of a batch and the share of tokens of each expert [E]."""
    load_E = (weights_TE > 0).float().mean(0).detach()
    share_E = (scores_TE / scores_TE.sum(-1, keepdim=True)).mean(0)
    return shape.experts * (load_E / shape.top_k * share_E).sum(), load_E


def block(
    shape: Shape, w: Weights, x_BLH: Tensor, rope: Rope, attend: Attend, dtype: torch.dtype, seen: Amax | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One decoder layer on the fp32 residual stream: states, load-balance loss, load [E] (both 0 of a dense layer).

    `w` holds this layer's tensors only; `seen` takes the largest inputs of its MLPs.
    """
    keeps = (BIAS, "input_scale")
    mine = {name: value if name.endswith(keeps) else value.to(dtype) for name, value in w.items()}
    normed = rms_norm(x_BLH, mine["input_layernorm.weight"].float(), shape.eps).to(dtype)
    own = {name.removeprefix("self_attn."): value for name, value in mine.items() if name.startswith("self_attn.")}
    x_BLH = x_BLH + attention(shape, own, normed, rope, attend).float()
    x_TH = rms_norm(x_BLH, mine["post_attention_layernorm.weight"].float(), shape.eps).to(dtype).flatten(0, 1)
    mlp = {name.removeprefix("mlp."): value for name, value in mine.items() if name.startswith("mlp.")}
    if "gate.weight" not in mlp:
        out_TH, balance = swiglu(mlp, x_TH, "", seen), x_BLH.new_zeros(())
        return x_BLH + out_TH.float().view_as(x_BLH), balance, x_BLH.new_zeros(shape.experts)
    weights_TE, scores_TE = route(shape, mlp, x_TH)
    balance, load_E = balance_of(shape, weights_TE, scores_TE)
    out_TH = experts(shape, mlp, x_TH, weights_TE, seen) + swiglu(mlp, x_TH, "shared_experts.", seen)
    return x_BLH + out_TH.float().view_as(x_BLH), balance, load_E


def join_ahead(shape: Shape, w: Weights, states_BLH: Tensor, embedded_BLH: Tensor, dtype: torch.dtype) -> Tensor:
    """What the prediction layer's block reads: the next token's embedding and the state before it, normed and mixed."""
    parts = (
        rms_norm(embedded_BLH, w["enorm.weight"].to(dtype).float(), shape.eps),
        rms_norm(states_BLH, w["hnorm.weight"].to(dtype).float(), shape.eps),
    )
    return F.linear(torch.cat(parts, -1).to(dtype), w["eh_proj.weight"].to(dtype)).float()
