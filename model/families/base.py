"""What a family must provide for `model.load` to build it: checked config, tensor specs, and readers for its layers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from loaders.hf_config import HfConfig
from loaders.source import TensorSource
from model.attention.base import Attention, AttentionSpec
from model.config import ModelSettingsError, UnsupportedModelError, flag, positive_int, positive_number
from model.decoder import AttentionLayer
from model.layer import Layer
from model.linear import GatedMlp
from model.parallel import ParallelLayout
from model.rope_config import RopeConfig, read_rope
from model.weights import RAGGED_ROWS, TensorSpec, WeightReader
from moe import MoeRunnerConfig, RankPlace
from moe.formats import ExpertWeights
from moe.group import SINGLE_RANK, Group

EMBEDDING_WEIGHT, HEAD = "model.embed_tokens.weight", "lm_head"
HEAD_WEIGHT = f"{HEAD}.weight"
_UNUSED_SUFFIXES = (
    *(f".{name}_scale" for name in ("q", "k", "v", "kv", "prob")),
    *(f"_proj.{name}" for name in ("output_scale", "output_quantizer._amax")),
    *(f".{name}_bmm_quantizer._amax" for name in ("q", "k", "v")),
    ".rotary_emb.inv_freq",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeParts:
    """What a MoE layer holds besides its routed experts, on the device.

    The output of the shared experts is this rank's part of a sum over the tensor-parallel ranks.
    """

    gate_weight_EH: torch.Tensor
    gate_bias_E: torch.Tensor | None = None
    correction_bias_E: torch.Tensor | None = None
    shared_experts: GatedMlp | None = None


class Family(ABC):
    """One architecture over one config.json; building it checks the config, reading comes later.

    Raises (when built):
        ModelConfigError: (of the loaders) a key that is missing or has the wrong type.
        UnsupportedModelError: a value that is not implemented or contradicts another; names the key.
    """

    architecture: ClassVar[str]
    default_norm_eps: ClassVar[float]
    default_rope: ClassVar[RopeConfig]  # where config.json says nothing of it

    def __init__(self, config: HfConfig) -> None:
        self.config = config
        self.num_layers = positive_int(config, "num_hidden_layers")
        self.hidden_size = positive_int(config, "hidden_size")
        self.vocab_size = positive_int(config, "vocab_size")
        self.norm_eps = positive_number(config, "rms_norm_eps", self.default_norm_eps)
        self.is_head_tied = flag(config, "tie_word_embeddings", False)
        self.max_model_len = config.max_position_embeddings
        self.rope = read_rope(config, self.default_rope)
        self.eos_token_ids = config.eos_token_ids

    @property
    @abstractmethod
    def moe(self) -> MoeRunnerConfig:
        """Shape, activation and routing of every MoE layer; what a deployment decides has its defaults."""

    @property
    @abstractmethod
    def rotary_dim(self) -> int:
        """Rotated numbers per head."""

    @abstractmethod
    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer has routed experts."""

    @abstractmethod
    def attention_spec(self, layer: int) -> AttentionSpec:
        """Kind of attention of a layer."""

    @abstractmethod
    def layer_specs(self, layer: int, source: TensorSource | None) -> Iterator[TensorSpec]:
        """Tensors of a layer; without a source, those that config.json describes."""

    @abstractmethod
    def expert_format(self, source: TensorSource, layer: int) -> str:
        """Number format of a MoE layer's experts, from headers alone."""

    @abstractmethod
    def read_attention(
        self, reader: WeightReader, layer: int, attention: Attention, tp: Group = SINGLE_RANK
    ) -> AttentionLayer:
        """Read and build a layer's attention: the heads of one rank of `tp`, whose outputs are summed over all."""

    @abstractmethod
    def read_experts(
        self, reader: WeightReader, layer: int, place: RankPlace, held: Sequence[int] | None = None
    ) -> ExpertWeights:
        """Canonical experts of a MoE layer that one rank holds, where the source keeps them.

        `held`: their numbers in the order of the rank's slots; None for its part of all.
        """

    @abstractmethod
    def read_moe_parts(self, reader: WeightReader, layer: int) -> MoeParts:
        """Gate and shared experts of a MoE layer."""

    @abstractmethod
    def read_dense_mlp(self, reader: WeightReader, layer: int, tp: Group = SINGLE_RANK) -> Layer:
        """The MLP of a layer without routed experts, divided among the ranks of `tp`."""

    def attention_part(self, layer: int, place: RankPlace) -> AttentionSpec:
        """`attention_spec` with the heads of one rank; where ranks outnumber the KV heads, some have the same."""
        spec = self.attention_spec(layer)
        num_heads = len(place.share("the query heads", spec.num_heads, 1))
        num_kv_heads = len(place.share("the KV heads", spec.num_kv_heads, 1, copies=True))
        return replace(spec, num_heads=num_heads, num_kv_heads=num_kv_heads)

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuse numbers of ranks that cannot share the heads or the experts; knows config.json alone.

        Raises:
            ModelSettingsError: names the flag and the sizes that would work.
        """
        heads = {(spec.num_heads, spec.num_kv_heads) for spec in map(self.attention_spec, range(self.num_layers))}

        def divides_heads(size: int) -> bool:
            return all(num % size == 0 and (num_kv % size == 0 or size % num_kv == 0) for num, num_kv in heads)

        if not divides_heads(layout.tp_size):
            num, num_kv = max(heads)
            works = ", ".join(str(size) for size in range(1, num + 1) if divides_heads(size))
            raise ModelSettingsError(
                f"tensor_parallel_size is {layout.tp_size}: it must divide the {num} query heads, and divide the "
                f"{num_kv} KV heads or be a multiple of them; {works} would work"
            )
        num_experts = self.moe.num_experts
        if num_experts % layout.ep_size:
            works = ", ".join(
                str(size)
                for size in range(1, layout.num_ranks + 1)
                if not (num_experts % size or layout.num_ranks % size)
            )
            raise ModelSettingsError(
                f"expert_parallel_size is {layout.ep_size}: it must divide the {num_experts} experts; with "
                f"{layout.num_ranks} ranks {works} would work"
            )

    def stored_format(self, layer: str) -> str:
        """Number format of a linear layer, by what config.json says of the quantization, and by its name."""
        scheme = self.config.quantization
        return "bf16" if scheme is None else scheme.format_of(layer)

    def skip_unneeded(self, source: TensorSource) -> None:
        """Tell the source which tensors are left out on purpose: scales of a quantized attention, old rope tables."""
        unused = [name for name in source.names() if name.endswith(_UNUSED_SUFFIXES)]
        source.skip(unused, "scales of a quantized KV cache, of which ours has none, and stored rope tables")

    def tensor_specs(self, source: TensorSource | None) -> Iterator[TensorSpec]:
        """Every tensor of the model."""
        embedding = (self.vocab_size, self.hidden_size)
        yield TensorSpec(EMBEDDING_WEIGHT, embedding, "vocab_size, hidden_size", split=RAGGED_ROWS)
        yield TensorSpec("model.norm.weight", (self.hidden_size,), "hidden_size")
        if not self.is_head_tied or (source is not None and HEAD_WEIGHT in source):
            yield TensorSpec(
                HEAD, embedding, "vocab_size, hidden_size", is_linear=True, split=RAGGED_ROWS, keeps_fp8=True
            )
        for layer in range(self.num_layers):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                name = f"model.layers.{layer}.{norm}.weight"
                yield TensorSpec(name, (self.hidden_size,), "hidden_size")
            yield from self.layer_specs(layer, source)


def check_routing_sizes(config: HfConfig, num_experts_key: str, top_k_key: str) -> tuple[int, int]:
    """(experts, top-k) of the config; top-k must not exceed the experts."""
    num_experts, top_k = positive_int(config, num_experts_key), positive_int(config, top_k_key)
    if top_k > num_experts:
        raise UnsupportedModelError(
            f"{config.path}: {top_k_key} is {top_k}: it must not exceed {num_experts_key} {num_experts}"
        )
    return num_experts, top_k
