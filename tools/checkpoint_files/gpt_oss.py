"""GPT-OSS as published: bf16, but experts in MXFP4, all of a layer in one tensor, rows of gate and up interleaved.

Sources: config.json and the safetensors headers of openai/gpt-oss-20b and openai/gpt-oss-120b on the Hugging Face hub.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.checkpoint_files.tensors import Tensor, Values, norm, weight

_GROUP = 32  # elements per scale


@dataclass(frozen=True, kw_only=True, slots=True)
class GptOss:
    """Sizes of one model; the defaults are those that both published models share."""

    layers: int
    experts: int
    hidden: int = 2880
    intermediate: int = 2880
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    vocab: int = 201088

    @property
    def config(self) -> dict[str, Any]:
        """config.json."""
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(self.layers)]
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "eos_token_id": self._known(200002),
            "experts_per_token": 4,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initial_context_length": 4096,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "layer_types": kinds,
            "max_position_embeddings": 131072,
            "num_attention_heads": self.heads,
            "num_experts_per_tok": 4,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "num_local_experts": self.experts,
            "output_router_logits": False,
            "pad_token_id": 199999,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
                ],
            },
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 4096, "truncate": False,
            },
            "rope_theta": 150000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": self.vocab,
        }  # fmt: skip

    @property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json."""
        eos = self._known(200002, 199999, 200012)
        return {"bos_token_id": 199998, "do_sample": True, "eos_token_id": eos, "pad_token_id": 199999}

    def _known(self, *token_ids: int) -> int | list[int]:
        """Those that a vocabulary made smaller still has: one as it is published, else a list."""
        known = [token_id for token_id in token_ids if token_id < self.vocab]
        return known[0] if len(token_ids) == len(known) == 1 else known

    @property
    def more_files(self) -> dict[str, dict[str, Any]]:
        """Further JSON files by name: none."""
        return {}

    @property
    def shard_bytes(self) -> int:
        """Most bytes of tensors in one file."""
        return 5_000_000_000

    def shard_name(self, number: int, count: int) -> str:
        """The published files are numbered from 0: model-00002-of-00002 is the third of three."""
        return f"model-{number - 1:05d}-of-{count - 1:05d}.safetensors"

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, layer by layer."""
        yield weight("model.embed_tokens.weight", self.vocab, self.hidden)
        for layer in range(self.layers):
            yield from self._layer(f"model.layers.{layer}")
        yield norm("model.norm.weight", self.hidden)
        yield weight("lm_head.weight", self.vocab, self.hidden)

    def _layer(self, prefix: str) -> Iterator[Tensor]:
        hidden, inter, experts = self.hidden, self.intermediate, self.experts
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield norm(f"{prefix}.input_layernorm.weight", hidden)
        yield norm(f"{prefix}.post_attention_layernorm.weight", hidden)
        for name, rows, columns in (("q", query, hidden), ("k", key, hidden), ("v", key, hidden), ("o", hidden, query)):
            yield weight(f"{prefix}.self_attn.{name}_proj.weight", rows, columns)
            yield weight(f"{prefix}.self_attn.{name}_proj.bias", rows)
        yield weight(f"{prefix}.self_attn.sinks", self.heads)
        yield weight(f"{prefix}.mlp.router.weight", experts, hidden)
        yield weight(f"{prefix}.mlp.router.bias", experts)
        for name, rows, columns in (("gate_up", 2 * inter, hidden), ("down", hidden, inter)):
            projection, groups = f"{prefix}.mlp.experts.{name}_proj", columns // _GROUP
            yield Tensor(f"{projection}_blocks", "U8", (experts, rows, groups, _GROUP // 2), Values.CODES)
            yield Tensor(f"{projection}_scales", "U8", (experts, rows, groups), Values.E8M0_SCALE)
            yield weight(f"{projection}_bias", experts, rows)
