"""GPT-OSS: grouped-query attention with sinks, a sliding window on alternate layers, YaRN, biases, and MXFP4 experts.

Shape letters: T tokens, H query heads, G KV heads, D head dim.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn, split_with_sizes  # `Tensor.split` does the same after checks in Python

from loaders.experts import read_gpt_oss_experts
from loaders.hf_config import HfConfig
from loaders.source import TensorSource
from model.attention.base import Attention, AttentionSpec
from model.batch import LayerKv
from model.config import (
    UnsupportedModelError,
    first_given,
    positive_int,
    positive_number,
    require_multiple,
    require_supported,
)
from model.decoder import AttentionLayer, StepState
from model.families.base import Family, MoeParts, check_routing_sizes
from model.layer import Layer
from model.linear import Linear, RowParallelLinear
from model.registry import register_family
from model.rope import pair_halves
from model.rope_config import RopeConfig
from model.weights import Split, TensorSpec, WeightReader
from moe import Activation, ExpertShape, MoeRunnerConfig, RankPlace, RoutingConfig, RoutingMethod
from moe.formats import ExpertWeights
from moe.group import SINGLE_RANK, Group, PartialSum, SumPlace

_SLIDING, _FULL = "sliding_attention", "full_attention"
_ALPHA = 1.702  # the activation's fixed gain; newer configs spell it out
_MXFP4_GROUP = 32
_HEAD_DIM = 64  # where the key is missing, as in transformers; null means hidden_size / num_attention_heads


class GptOssAttention(AttentionLayer):
    """q, k and v in one matrix, their rows re-ordered for pairwise rope; one sink logit per query head."""

    def __init__(
        self, *, spec: AttentionSpec, attention: Attention, qkv: Linear, out: RowParallelLinear, sinks_H: torch.Tensor
    ) -> None:
        super().__init__()
        self.spec = spec
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.backend = attention
        self.qkv = qkv
        self.out = out
        self.sinks_H = nn.Parameter(sinks_H.float(), requires_grad=False)

    def forward(self, x_TH: torch.Tensor, step: StepState, kv: LayerKv) -> torch.Tensor | PartialSum:
        """[T, hidden] to [T, hidden]."""
        spec = self.spec
        heads = self.qkv(x_TH).view(x_TH.shape[0], -1, spec.key_dim)
        q_THD, k_TGD, v_TGD = split_with_sizes(heads, self._heads, 1)
        out_THD = self.backend.run(spec, step.plan, kv, q_THD, k_TGD, v_TGD, self.sinks_H, step.rotation_T1D)
        projected_TH: torch.Tensor | PartialSum = self.out(out_THD.flatten(1))
        return projected_TH


@register_family("GptOssForCausalLM")
class GptOssFamily(Family):
    """Names and shapes of the published files (MXFP4 experts) and of bf16 re-uploads."""

    architecture = "GptOssForCausalLM"
    default_norm_eps = 1e-5
    default_rope = RopeConfig(
        theta=150000.0, rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
    )

    def __init__(self, config: HfConfig) -> None:
        super().__init__(config)
        require_supported(config, "hidden_act", ("silu",))
        require_supported(config, "attention_bias", (True,))
        require_multiple(config, "num_attention_heads", "num_key_value_heads")
        self.num_heads = positive_int(config, "num_attention_heads")
        self.num_kv_heads = positive_int(config, "num_key_value_heads")
        by_width = max(1, self.hidden_size // self.num_heads)
        self.head_dim = positive_int(config, "head_dim", by_width if "head_dim" in config.raw else _HEAD_DIM)
        if self.head_dim % 2:
            raise UnsupportedModelError(f"{config.path}: head_dim is {self.head_dim}: rope needs an even number")
        self.windows = self._windows()
        self._moe = self._moe_config()

    def _windows(self) -> list[int | None]:
        """Window of each layer; without `layer_types`, layers 0, 2, 4... slide."""
        config = self.config
        if config.get("layer_types") is None:
            kinds = [_FULL if layer % 2 else _SLIDING for layer in range(self.num_layers)]
        else:
            kinds = config.require("layer_types", list)
        if len(kinds) != self.num_layers:
            raise UnsupportedModelError(
                f"{config.path}: layer_types has {len(kinds)} entries, num_hidden_layers is {self.num_layers}"
            )
        unknown = [kind for kind in kinds if kind not in (_SLIDING, _FULL)]
        if unknown:
            raise UnsupportedModelError(
                f"{config.path}: layer_types {unknown[0]!r} is not supported; supported: {_SLIDING}, {_FULL}"
            )
        window = positive_int(config, "sliding_window") if _SLIDING in kinds else None
        return [window if kind == _SLIDING else None for kind in kinds]

    def _moe_config(self) -> MoeRunnerConfig:
        config = self.config
        num_experts, top_k = check_routing_sizes(
            config,
            first_given(config, "num_local_experts", "num_experts"),
            first_given(config, "num_experts_per_tok", "experts_per_token"),
        )
        activation = Activation(
            alpha=positive_number(config, "swiglu_alpha", _ALPHA),
            beta=1.0,
            limit=positive_number(config, "swiglu_limit", 7.0),
        )
        routing = RoutingConfig(method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=num_experts, top_k=top_k)
        shape = ExpertShape(
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=self.hidden_size,
            intermediate_size=positive_int(config, "intermediate_size"),
        )
        return MoeRunnerConfig(shape=shape, activation=activation, has_biases=True, routing=routing)

    @property
    def moe(self) -> MoeRunnerConfig:
        """Clamped SwiGLU, softmax over the chosen logits."""
        return self._moe

    @property
    def rotary_dim(self) -> int:
        """The whole head."""
        return self.head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """All of them."""
        del layer
        return True

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Scale 1/sqrt(head_dim); the YaRN factor sits on cos and sin."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=self.windows[layer],
        )

    def layer_specs(self, layer: int, source: TensorSource | None) -> Iterator[TensorSpec]:
        """Attention, router and experts."""
        prefix = f"model.layers.{layer}"
        hidden, moe = self.hidden_size, self.moe
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q_keys, kv_keys = "num_attention_heads, head_dim, hidden_size", "num_key_value_heads, head_dim, hidden_size"
        q_split, kv_split = Split(unit=self.head_dim), Split(unit=self.head_dim, copies=True)
        for name, shape, keys, split in (
            ("self_attn.q_proj", (q_rows, hidden), q_keys, q_split),
            ("self_attn.k_proj", (kv_rows, hidden), kv_keys, kv_split),
            ("self_attn.v_proj", (kv_rows, hidden), kv_keys, kv_split),
            ("self_attn.o_proj", (hidden, q_rows), q_keys, Split("columns", self.head_dim)),
            ("mlp.router", (moe.num_experts, hidden), "num_local_experts, hidden_size", None),
        ):
            is_fp32 = name == "mlp.router"
            yield TensorSpec(f"{prefix}.{name}", shape, keys, is_linear=True, is_fp32=is_fp32, split=split)
            bias_split = split if split is not None and split.axis == "rows" else None
            yield TensorSpec(f"{prefix}.{name}.bias", shape[:1], keys, split=bias_split)
        yield TensorSpec(f"{prefix}.self_attn.sinks", (self.num_heads,), "num_attention_heads", split=Split())
        experts = f"{prefix}.mlp.experts"
        found = self._described_format(experts) if source is None else self.expert_format(source, layer)
        yield from self._expert_specs(experts, is_packed=found == "mxfp4")

    def _expert_specs(self, prefix: str, *, is_packed: bool) -> Iterator[TensorSpec]:
        """Stored rows of gate and up alternate; a re-upload in bf16 holds the transposed matrices."""
        moe, hidden = self.moe, self.hidden_size
        keys = "num_local_experts, intermediate_size, hidden_size"
        for name, num_rows, num_cols in (
            ("gate_up_proj", 2 * moe.intermediate_size, hidden),
            ("down_proj", hidden, moe.intermediate_size),
        ):
            stack = (moe.num_experts, num_rows)
            yield TensorSpec(f"{prefix}.{name}_bias", stack, keys)
            if is_packed:
                groups = (*stack, num_cols // _MXFP4_GROUP)
                yield TensorSpec(f"{prefix}.{name}_blocks", (*groups, _MXFP4_GROUP // 2), keys, dtype=torch.uint8)
                yield TensorSpec(f"{prefix}.{name}_scales", groups, keys, dtype=torch.uint8)
            else:
                yield TensorSpec(f"{prefix}.{name}", (moe.num_experts, num_cols, num_rows), keys)

    def _described_format(self, experts: str) -> str:
        found = self.stored_format(experts)
        if found not in ("mxfp4", "bf16"):
            raise UnsupportedModelError(
                f"{self.config.path}: by its quantization the experts of this GPT-OSS model are in {found}, and only "
                "mxfp4 and bf16 can be read: take openai's upload, or one in bf16"
            )
        return found

    def expert_format(self, source: TensorSource, layer: int) -> str:
        """Decided by the presence of blocks."""
        blocks = f"model.layers.{layer}.mlp.experts.gate_up_proj_blocks"
        return "mxfp4" if blocks in source else "bf16"

    def read_attention(
        self, reader: WeightReader, layer: int, attention: Attention, tp: Group = SINGLE_RANK
    ) -> AttentionLayer:
        """Fuse q, k and v; re-order q and k rows so that rope finds its pairs side by side."""
        prefix = f"model.layers.{layer}.self_attn"
        q = reader.rows_and_bias(f"{prefix}.q_proj", self.head_dim)
        k, v = (reader.rows_and_bias(f"{prefix}.{name}_proj", self.head_dim, copies=True) for name in "kv")
        weight, bias = (
            torch.cat((pair_halves(q_part, self.head_dim), pair_halves(k_part, self.head_dim), v_part))
            for q_part, k_part, v_part in zip(q, k, v, strict=True)
        )
        return GptOssAttention(
            spec=self.attention_part(layer, reader.place),
            attention=attention,
            qkv=Linear(weight, bias),
            out=RowParallelLinear(
                *reader.columns_and_bias(f"{prefix}.o_proj", self.head_dim), group=tp, place=SumPlace.ATTENTION
            ),
            sinks_H=reader.entries(f"{prefix}.sinks", may_be_masked=True),
        )

    def read_experts(
        self, reader: WeightReader, layer: int, place: RankPlace, held: Sequence[int] | None = None
    ) -> ExpertWeights:
        """MXFP4 or bf16, de-interleaved by the loader."""
        return read_gpt_oss_experts(
            reader.source, f"model.layers.{layer}.mlp.experts", self.moe.shape, place, held=held
        )

    def read_moe_parts(self, reader: WeightReader, layer: int) -> MoeParts:
        """The router has a bias; there are no shared experts."""
        prefix = f"model.layers.{layer}.mlp.router"
        return MoeParts(
            gate_weight_EH=reader.vector(f"{prefix}.weight"),
            gate_bias_E=reader.vector(f"{prefix}.bias", may_be_masked=True),
        )

    def read_dense_mlp(self, reader: WeightReader, layer: int, tp: Group = SINGLE_RANK) -> Layer:
        """GPT-OSS has none."""
        raise UnsupportedModelError(f"layer {layer} of {self.architecture} has no dense MLP")
