"""DeepSeek-V3: latent attention (MLA, absorbed), YaRN with mscale, dense first layers, grouped routing, shared experts.

The cache holds one vector per token: the normed latent and the rotated k_pe. The up-projection of keys is folded into
the query and that of values into the output, for prefill as for decode, so there is one attention and nothing to
expand. Shape letters: T tokens, H heads, N nope dims, P rope dims, V value dims, C latent dims, Q query latent dims.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from loaders.experts import read_split_experts
from loaders.hf_config import HfConfig
from loaders.naming import skip_prediction_layers
from loaders.quant import inspect_linear
from loaders.source import TensorSource
from model.attention.base import Attention, AttentionSpec
from model.batch import LayerKv
from model.config import UnsupportedModelError, flag, positive_int, positive_number, require_supported
from model.decoder import AttentionLayer, StepState
from model.families.base import Family, MoeParts, check_routing_sizes
from model.layer import Layer
from model.linear import GatedMlp, Linear, RowParallelLinear, join_rows
from model.norm import RmsNorm
from model.registry import register_family
from model.rope import softmax_factor
from model.rope_config import RopeConfig
from model.weights import RAGGED_COLUMNS, RAGGED_ROWS, Split, TensorSpec, WeightReader
from moe import ExpertShape, MoeRunnerConfig, RankPlace, RoutingConfig, RoutingMethod
from moe.formats import ExpertWeights
from moe.group import SINGLE_RANK, Group, PartialSum, SumPlace

_LATENT_EPS = 1e-6  # the published code gives the latent norms this epsilon, whatever rms_norm_eps says
_NUM_DENSE = 3  # layers without experts where the key is missing, as in transformers
_GROUP_DEFAULTS = {"n_group": 8, "topk_group": 4}


class MlaAttention(AttentionLayer):
    """Latent attention with absorbed up-projections `uk_HNC` and `uv_HCV`.

    `down` makes the KV latent and k_pe, preceded by the query latent where the model has one (then `q_norm` is set).
    """

    def __init__(
        self,
        *,
        spec: AttentionSpec,
        attention: Attention,
        down: Linear,
        q_norm: RmsNorm | None,
        q_up: Linear,
        kv_norm: RmsNorm,
        uk_HNC: torch.Tensor,
        uv_HCV: torch.Tensor,
        out: RowParallelLinear,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.backend = attention
        self.down = down
        self.q_norm = q_norm
        self.q_up = q_up
        self.kv_norm = kv_norm
        self.uk_HNC = nn.Parameter(uk_HNC, requires_grad=False)
        self.uv_HCV = nn.Parameter(uv_HCV, requires_grad=False)
        self.out = out

    def forward(self, x_TH: torch.Tensor, step: StepState, kv: LayerKv) -> torch.Tensor | PartialSum:
        """[T, hidden] to [T, hidden]."""
        spec, num_tokens = self.spec, x_TH.shape[0]
        num_heads, nope_dim, latent_dim = self.uk_HNC.shape
        down = self.down(x_TH)
        q_in = x_TH if self.q_norm is None else self.q_norm(down[:, : -spec.key_dim])
        rope_dim = spec.key_dim - latent_dim
        q_nope_THN, q_pe_THP = (
            self.q_up(q_in).view(-1, num_heads, nope_dim + rope_dim).split((nope_dim, rope_dim), dim=-1)
        )
        q_THD = x_TH.new_empty(num_tokens, num_heads, spec.key_dim)
        torch.bmm(q_nope_THN.transpose(0, 1), self.uk_HNC, out=q_THD[..., :latent_dim].transpose(0, 1))
        mixed_THC = self.backend.run_latents(
            spec, step.plan, kv, q_THD, q_pe_THP, down[:, -spec.key_dim :], self.kv_norm, step.rotation_T1D
        )
        out_THV = x_TH.new_empty(num_tokens, num_heads, self.uv_HCV.shape[2])
        torch.bmm(mixed_THC.transpose(0, 1), self.uv_HCV, out=out_THV.transpose(0, 1))
        projected_TH: torch.Tensor | PartialSum = self.out(out_THV.flatten(1))
        return projected_TH


@register_family("DeepseekV3ForCausalLM")
class DeepseekV3Family(Family):
    """Names and shapes of the published FP8 files, of ModelOpt's NVFP4 exports, and of plain bf16."""

    architecture = "DeepseekV3ForCausalLM"
    default_norm_eps = 1e-6
    default_rope = RopeConfig(theta=10000.0)

    def __init__(self, config: HfConfig) -> None:
        super().__init__(config)
        for key, supported in (
            ("hidden_act", ("silu",)),
            ("attention_bias", (False,)),
            ("rope_interleave", (True,)),
            ("scoring_func", ("sigmoid",)),
            ("topk_method", ("noaux_tc",)),
        ):
            require_supported(config, key, supported)
        self.num_heads = positive_int(config, "num_attention_heads")
        require_supported(config, "num_key_value_heads", (self.num_heads,))
        self.nope_dim = positive_int(config, "qk_nope_head_dim")
        self.rope_dim = positive_int(config, "qk_rope_head_dim")
        self.kv_rank = positive_int(config, "kv_lora_rank")
        for key, dim in (
            ("qk_nope_head_dim", self.nope_dim), ("qk_rope_head_dim", self.rope_dim), ("kv_lora_rank", self.kv_rank),
        ):  # fmt: skip
            if dim % 2:
                raise UnsupportedModelError(f"{config.path}: {key} is {dim}: it must be even")
        self.value_dim = positive_int(config, "v_head_dim")
        self.q_rank = None if config.get("q_lora_rank") is None else positive_int(config, "q_lora_rank")
        self.dense_size = positive_int(config, "intermediate_size")
        self.num_dense = self._num_dense_layers()
        self.moe_freq = positive_int(config, "moe_layer_freq", 1)
        self.num_shared = positive_int(config, "n_shared_experts", 1) if config.raw.get("n_shared_experts", 1) else 0
        self._q_split = Split(unit=self.nope_dim + self.rope_dim)
        self._kv_split = Split(unit=self.nope_dim + self.value_dim)
        self._out_split = Split("columns", self.value_dim)
        self._moe = self._moe_config()

    def _num_dense_layers(self) -> int:
        if "first_k_dense_replace" not in self.config.raw:
            return _NUM_DENSE
        value = self.config.require("first_k_dense_replace", int)
        if value < 0:
            raise UnsupportedModelError(
                f"{self.config.path}: first_k_dense_replace is {value}: it must not be negative"
            )
        return int(value)

    def _moe_config(self) -> MoeRunnerConfig:
        config = self.config
        num_experts, top_k = check_routing_sizes(config, "n_routed_experts", "num_experts_per_tok")
        num_groups, num_kept = self._groups()
        if num_experts % num_groups or num_kept > num_groups or top_k > num_kept * (num_experts // num_groups):
            missing = " and ".join(key for key in _GROUP_DEFAULTS if key not in config.raw)
            raise UnsupportedModelError(
                f"{config.path}: n_routed_experts {num_experts}, n_group {num_groups}, topk_group {num_kept} and "
                f"num_experts_per_tok {top_k} do not fit: groups must be equal, and the kept ones hold enough experts"
                + (f"; {missing} had to be taken from the published model, since the file lacks it" if missing else "")
            )
        routing = RoutingConfig(
            method=RoutingMethod.SIGMOID_GROUPED,
            num_experts=num_experts,
            top_k=top_k,
            num_groups=num_groups,
            num_kept_groups=num_kept,
            normalize=flag(config, "norm_topk_prob", "norm_topk_prob" not in config.raw),  # null is false
            routed_scaling_factor=positive_number(config, "routed_scaling_factor", 2.5),
        )
        shape = ExpertShape(
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=self.hidden_size,
            intermediate_size=positive_int(config, "moe_intermediate_size"),
        )
        return MoeRunnerConfig(shape=shape, routing=routing)

    def _groups(self) -> tuple[int, int]:
        """Groups of experts, and how many of them a token may choose from; a null says that there are none."""
        if any(self.config.raw.get(key, default) is None for key, default in _GROUP_DEFAULTS.items()):
            return 1, 1
        num_groups, num_kept = (positive_int(self.config, key, default) for key, default in _GROUP_DEFAULTS.items())
        return num_groups, num_kept

    @property
    def moe(self) -> MoeRunnerConfig:
        """Plain SwiGLU, sigmoid scores with a correction bias, limited to groups."""
        return self._moe

    @property
    def rotary_dim(self) -> int:
        """The rope part of a head."""
        return self.rope_dim

    def is_moe_layer(self, layer: int) -> bool:
        """From `first_k_dense_replace` on, every `moe_layer_freq`-th."""
        return layer >= self.num_dense and layer % self.moe_freq == 0

    def attention_spec(self, layer: int) -> AttentionSpec:
        """One KV head that carries keys and values; YaRN's mscale squared is part of the scale."""
        del layer
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=1,
            key_dim=self.kv_rank + self.rope_dim,
            value_dim=self.kv_rank,
            scale=(self.nope_dim + self.rope_dim) ** -0.5 * softmax_factor(self.rope),
            values_in_keys=True,
        )

    def skip_unneeded(self, source: TensorSource) -> None:
        """What no family needs, and prediction layers."""
        super().skip_unneeded(source)
        skip_prediction_layers(source, self.num_layers)

    def layer_specs(self, layer: int, source: TensorSource | None) -> Iterator[TensorSpec]:
        """Attention, then a dense MLP or gate, experts and shared experts."""
        del source  # names do not depend on the format
        prefix = f"model.layers.{layer}"
        yield from self._attention_specs(f"{prefix}.self_attn")
        if not self.is_moe_layer(layer):
            keys = "intermediate_size, hidden_size"
            yield from self._mlp_specs(f"{prefix}.mlp", self.dense_size, keys)
            return
        moe, keys = self.moe, "moe_intermediate_size, hidden_size"
        gate_keys = "n_routed_experts, hidden_size"
        yield TensorSpec(f"{prefix}.mlp.gate.weight", (moe.num_experts, self.hidden_size), gate_keys)
        bias = f"{prefix}.mlp.gate.e_score_correction_bias"
        yield TensorSpec(bias, (moe.num_experts,), gate_keys, dtype=torch.float32)
        format_name = self.stored_format(f"{prefix}.mlp.experts.0.gate_proj")
        for expert in range(moe.num_experts):
            yield from self._mlp_specs(f"{prefix}.mlp.experts.{expert}", moe.intermediate_size, keys, format_name)
        if self.num_shared:
            size = moe.intermediate_size * self.num_shared
            yield from self._mlp_specs(f"{prefix}.mlp.shared_experts", size, f"n_shared_experts, {keys}")

    def _mlp_specs(self, prefix: str, size: int, keys: str, format_name: str | None = None) -> Iterator[TensorSpec]:
        format_name = format_name or self.stored_format(f"{prefix}.gate_proj")
        rows, columns = (size, self.hidden_size), (self.hidden_size, size)
        for name, shape, split in (
            ("gate_proj", rows, RAGGED_ROWS), ("up_proj", rows, RAGGED_ROWS), ("down_proj", columns, RAGGED_COLUMNS),
        ):  # fmt: skip
            yield TensorSpec(
                f"{prefix}.{name}", shape, keys, is_linear=True, format_name=format_name, split=split, keeps_fp8=True
            )

    def _attention_specs(self, prefix: str) -> Iterator[TensorSpec]:
        q_rows = self.num_heads * (self.nope_dim + self.rope_dim)
        head_keys = "num_attention_heads, qk_nope_head_dim"
        linears: list[tuple[str, tuple[int, int], str]] = []
        if self.q_rank is None:
            linears.append(("q_proj", (q_rows, self.hidden_size), f"{head_keys}, qk_rope_head_dim, hidden_size"))
        else:
            yield TensorSpec(f"{prefix}.q_a_layernorm.weight", (self.q_rank,), "q_lora_rank")
            linears.append(("q_a_proj", (self.q_rank, self.hidden_size), "q_lora_rank, hidden_size"))
            linears.append(("q_b_proj", (q_rows, self.q_rank), f"{head_keys}, qk_rope_head_dim, q_lora_rank"))
        kv_rows = self.num_heads * (self.nope_dim + self.value_dim)
        latent_keys = "kv_lora_rank, qk_rope_head_dim, hidden_size"
        linears += [
            ("kv_a_proj_with_mqa", (self.kv_rank + self.rope_dim, self.hidden_size), latent_keys),
            ("kv_b_proj", (kv_rows, self.kv_rank), f"{head_keys}, v_head_dim, kv_lora_rank"),
            ("o_proj", (self.hidden_size, self.num_heads * self.value_dim), "num_attention_heads, v_head_dim"),
        ]
        yield TensorSpec(f"{prefix}.kv_a_layernorm.weight", (self.kv_rank,), "kv_lora_rank")
        splits = {
            "q_proj": self._q_split, "q_b_proj": self._q_split, "kv_b_proj": self._kv_split, "o_proj": self._out_split,
        }  # fmt: skip
        for name, shape, keys in linears:
            yield TensorSpec(
                f"{prefix}.{name}", shape, keys, is_linear=True, format_name=self.stored_format(f"{prefix}.{name}"),
                split=splits.get(name), keeps_fp8=name != "kv_b_proj",
            )  # fmt: skip

    def expert_format(self, source: TensorSource, layer: int) -> str:
        """Decided by the first expert's headers; the loader checks that the others agree."""
        return inspect_linear(source, f"model.layers.{layer}.mlp.experts.0.gate_proj").format_name

    def read_attention(
        self, reader: WeightReader, layer: int, attention: Attention, tp: Group = SINGLE_RANK
    ) -> AttentionLayer:
        """Fuse the down-projections; split kv_b, dequantized from its stored bytes, into its key and value halves.

        The latents are whole on every rank; what makes heads of them is divided.
        """
        prefix = f"model.layers.{layer}.self_attn"
        down, q_norm, q_up_name = [reader.linear(f"{prefix}.kv_a_proj_with_mqa")], None, "q_proj"
        if self.q_rank is not None:
            down.insert(0, reader.linear(f"{prefix}.q_a_proj"))
            q_norm, q_up_name = RmsNorm(reader.vector(f"{prefix}.q_a_layernorm.weight"), _LATENT_EPS), "q_b_proj"
        head_rows = self.nope_dim + self.value_dim
        kv_b_HRC = reader.rows(f"{prefix}.kv_b_proj", head_rows).view(-1, head_rows, self.kv_rank)
        uk_HNC, uv_HVC = kv_b_HRC[:, : self.nope_dim], kv_b_HRC[:, self.nope_dim :]
        return MlaAttention(
            spec=self.attention_part(layer, reader.place),
            attention=attention,
            down=Linear(join_rows(down)),
            q_norm=q_norm,
            q_up=Linear(reader.linear(f"{prefix}.{q_up_name}", self._q_split)),
            kv_norm=RmsNorm(reader.vector(f"{prefix}.kv_a_layernorm.weight"), _LATENT_EPS),
            uk_HNC=uk_HNC.contiguous(),
            uv_HCV=uv_HVC.transpose(1, 2).contiguous(),
            out=RowParallelLinear(
                reader.linear(f"{prefix}.o_proj", self._out_split), group=tp, place=SumPlace.ATTENTION
            ),
        )

    def read_experts(
        self, reader: WeightReader, layer: int, place: RankPlace, held: Sequence[int] | None = None
    ) -> ExpertWeights:
        """Whatever format the files have."""
        return read_split_experts(reader.source, f"model.layers.{layer}.mlp.experts", self.moe.shape, place, held=held)

    def read_moe_parts(self, reader: WeightReader, layer: int) -> MoeParts:
        """Gate and correction bias in fp32; shared experts are one dense MLP, whose part of a sum is left as it is."""
        prefix = f"model.layers.{layer}.mlp"
        return MoeParts(
            gate_weight_EH=reader.vector(f"{prefix}.gate.weight"),
            correction_bias_E=reader.vector(f"{prefix}.gate.e_score_correction_bias", may_be_masked=True),
            shared_experts=_read_mlp(reader, f"{prefix}.shared_experts", SINGLE_RANK) if self.num_shared else None,
        )

    def read_dense_mlp(self, reader: WeightReader, layer: int, tp: Group = SINGLE_RANK) -> Layer:
        """The MLP of the first layers."""
        return _read_mlp(reader, f"model.layers.{layer}.mlp", tp)


def _read_mlp(reader: WeightReader, prefix: str, sums_over: Group) -> GatedMlp:
    gate_IH, up_IH = (reader.linear(f"{prefix}.{name}_proj", RAGGED_ROWS) for name in ("gate", "up"))
    return GatedMlp(gate_IH, up_IH, reader.linear(f"{prefix}.down_proj", RAGGED_COLUMNS), sums_over=sums_over)
