"""DeepSeek-V3 as published (FP8 in blocks of 128 x 128), and its NVFP4 export by ModelOpt.

Both hold the layer of multi-token prediction behind the model's own. ModelOpt leaves attention, embedding, head, gates
and that layer in bf16; every quantized linear layer has its codes, a scale per 16 elements, and two scalars.
Sources: config.json, hf_quant_config.json and the safetensors headers of deepseek-ai/DeepSeek-V3 and of NVIDIA's FP4
exports of it on the Hugging Face hub; README_WEIGHTS.md of the former for the prediction layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.checkpoint_files.tensors import Tensor, Values, norm, weight

_BLOCK = 128
_GROUP = 16
_NVFP4_IGNORED = ("lm_head", "model.embed_tokens", "model.layers.*.self_attn*", "model.layers.*.mlp.gate")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekV3:
    """Sizes of one model; the defaults are those of the published one."""

    is_nvfp4: bool = False
    layers: int = 61
    experts: int = 256
    hidden: int = 7168
    intermediate: int = 2048
    dense_intermediate: int = 18432
    heads: int = 128
    vocab: int = 129280
    query_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128

    @property
    def num_dense(self) -> int:
        """Layers without experts; one layer with experts is left in a model that is cut short."""
        return min(3, self.layers - 1)

    @property
    def config(self) -> dict[str, Any]:
        """config.json; ModelOpt's exports keep quantization in a file of its own."""
        fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "ep_size": 1,
            "first_k_dense_replace": self.num_dense,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.dense_intermediate,
            "kv_lora_rank": self.kv_rank,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": self.intermediate,
            "moe_layer_freq": 1,
            "n_group": 8,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": self.heads,
            "num_experts_per_tok": 8,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.heads,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": self.query_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "v_head_dim": self.value_dim,
            "vocab_size": self.vocab,
            **({} if self.is_nvfp4 else {"quantization_config": fp8}),
        }  # fmt: skip

    @property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json."""
        return {"bos_token_id": 0, "do_sample": True, "eos_token_id": 1, "temperature": 0.6, "top_p": 0.95}

    @property
    def more_files(self) -> dict[str, dict[str, Any]]:
        """Further JSON files by name: what ModelOpt writes beside config.json."""
        if not self.is_nvfp4:
            return {}
        quantization = {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": _GROUP,
            "exclude_modules": [*_NVFP4_IGNORED, f"model.layers.{self.layers}*"],
        }
        return {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": quantization}}

    @property
    def shard_bytes(self) -> int:
        """Most bytes of tensors in one file. DeepSeek's own files end with a layer, too, so they are a few more."""
        return 5 * 2**30 if self.is_nvfp4 else 4_300_000_000

    def shard_name(self, number: int, count: int) -> str:
        """DeepSeek writes the count with six digits."""
        return f"model-{number:05d}-of-{count:0{5 if self.is_nvfp4 else 6}d}.safetensors"

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, layer by layer, the prediction layer last but one for the norm and head."""
        yield weight("model.embed_tokens.weight", self.vocab, self.hidden)
        for layer in range(self.layers):
            yield from self._layer(layer, is_plain=False)
        yield from self._prediction_layer()
        yield norm("model.norm.weight", self.hidden)
        yield weight("lm_head.weight", self.vocab, self.hidden)

    def _prediction_layer(self) -> Iterator[Tensor]:
        prefix = f"model.layers.{self.layers}"
        yield weight(f"{prefix}.embed_tokens.weight", self.vocab, self.hidden)
        yield norm(f"{prefix}.enorm.weight", self.hidden)
        yield norm(f"{prefix}.hnorm.weight", self.hidden)
        yield weight(f"{prefix}.eh_proj.weight", self.hidden, 2 * self.hidden)
        yield from self._layer(self.layers, is_plain=self.is_nvfp4)
        yield norm(f"{prefix}.shared_head.norm.weight", self.hidden)
        yield weight(f"{prefix}.shared_head.head.weight", self.vocab, self.hidden)

    def _layer(self, layer: int, *, is_plain: bool) -> Iterator[Tensor]:
        prefix, hidden = f"model.layers.{layer}", self.hidden
        yield norm(f"{prefix}.input_layernorm.weight", hidden)
        yield norm(f"{prefix}.post_attention_layernorm.weight", hidden)
        yield from self._attention(f"{prefix}.self_attn")
        if layer < self.num_dense:
            yield from self._mlp(f"{prefix}.mlp", self.dense_intermediate, is_plain)
            return
        yield weight(f"{prefix}.mlp.gate.weight", self.experts, hidden)
        yield Tensor(f"{prefix}.mlp.gate.e_score_correction_bias", "F32", (self.experts,), Values.WEIGHT)
        for expert in range(self.experts):
            yield from self._mlp(f"{prefix}.mlp.experts.{expert}", self.intermediate, is_plain)
        yield from self._mlp(f"{prefix}.mlp.shared_experts", self.intermediate, is_plain)

    def _attention(self, prefix: str) -> Iterator[Tensor]:
        """Latent attention: plain in the NVFP4 export, FP8 in the published model."""
        heads, query_dim = self.heads, self.nope_dim + self.rope_dim
        yield norm(f"{prefix}.q_a_layernorm.weight", self.query_rank)
        yield norm(f"{prefix}.kv_a_layernorm.weight", self.kv_rank)
        for name, rows, columns in (
            ("q_a_proj", self.query_rank, self.hidden),
            ("q_b_proj", heads * query_dim, self.query_rank),
            ("kv_a_proj_with_mqa", self.kv_rank + self.rope_dim, self.hidden),
            ("kv_b_proj", heads * (self.nope_dim + self.value_dim), self.kv_rank),
            ("o_proj", self.hidden, heads * self.value_dim),
        ):
            yield from self._linear(f"{prefix}.{name}", rows, columns, is_plain=self.is_nvfp4)

    def _mlp(self, prefix: str, size: int, is_plain: bool) -> Iterator[Tensor]:
        for name, rows, columns in (
            ("gate_proj", size, self.hidden), ("up_proj", size, self.hidden), ("down_proj", self.hidden, size),
        ):  # fmt: skip
            yield from self._linear(f"{prefix}.{name}", rows, columns, is_plain=is_plain)

    def _linear(self, prefix: str, rows: int, columns: int, *, is_plain: bool) -> Iterator[Tensor]:
        if is_plain:
            yield weight(f"{prefix}.weight", rows, columns)
        elif self.is_nvfp4:
            yield Tensor(f"{prefix}.weight", "U8", (rows, columns // 2), Values.CODES)
            yield Tensor(f"{prefix}.weight_scale", "F8_E4M3", (rows, columns // _GROUP), Values.NVFP4_BLOCK_SCALE)
            yield Tensor(f"{prefix}.weight_scale_2", "F32", (), Values.NVFP4_TENSOR_SCALE)
            yield Tensor(f"{prefix}.input_scale", "F32", (), Values.INPUT_SCALE)
        else:
            grid = (-(-rows // _BLOCK), -(-columns // _BLOCK))
            yield Tensor(f"{prefix}.weight", "F8_E4M3", (rows, columns), Values.FP8_WEIGHT)
            yield Tensor(f"{prefix}.weight_scale_inv", "F32", grid, Values.FP8_BLOCK_SCALE)
