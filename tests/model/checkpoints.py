"""Helpers: small random models made by transformers, and their checkpoints in the published quantized forms."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GptOssConfig, GptOssForCausalLM

from moe.formats import Fp8BlockWeight, Fp8TensorWeight, Mxfp4Weight, Nvfp4Weight

VOCAB = 96


def make_gpt_oss(seed: int = 0, **changes: Any) -> GptOssForCausalLM:
    """Two layers, window 8, YaRN that starts at position 32; biases and sinks are random too."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8,
        "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 32,
        },
        "eos_token_id": 7, "pad_token_id": 0, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(seed)
    return _randomised(GptOssForCausalLM(GptOssConfig(**(settings | changes))))


def make_deepseek(seed: int = 0, **changes: Any) -> DeepseekV3ForCausalLM:
    """One dense and two MoE layers, eight experts in four groups; sizes that leave ragged FP8 blocks."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 160, "intermediate_size": 192, "moe_intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1,
        "n_routed_experts": 8, "routed_scaling_factor": 2.5, "kv_lora_rank": 32, "q_lora_rank": 48,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20, "n_group": 4, "topk_group": 2,
        "num_experts_per_tok": 3, "first_k_dense_replace": 1, "max_position_embeddings": 512,
        "num_nextn_predict_layers": 1, "eos_token_id": [1, 2], "initializer_range": 0.15,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 32,
        },
    }  # fmt: skip
    torch.manual_seed(seed)
    return _randomised(DeepseekV3ForCausalLM(DeepseekV3Config(**(settings | changes))))


def _randomised(model: Any) -> Any:
    """Random values for whatever transformers starts at 0 or 1, large enough to matter."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("bias", "sinks", "bias_E")):
                tensor.normal_(0, 0.5)
            elif "norm" in name:
                tensor.normal_(1, 0.2)
    return model.eval()


def state_by_file_name(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Save with transformers and read the file back: names and layouts as it writes them; leaves only config.json."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    return tensors


def write(folder: Path, tensors: dict[str, torch.Tensor], config_changes: dict[str, Any] | None = None) -> None:
    """Write tensors beside config.json, whose keys may be changed; None removes one."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    config = json.loads(path.read_text()) | (config_changes or {})
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def pack_mxfp4(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """GPT-OSS as published: (file tensors, the same with experts dequantized in transformers' layout)."""
    packed, dense = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            weight = Mxfp4Weight.quantize(tensor.transpose(1, 2))
            del packed[name]
            packed[f"{name}_blocks"] = weight.codes.unflatten(-1, (-1, 16))
            packed[f"{name}_scales"] = weight.scales
            dense[name] = weight.dequantize().transpose(1, 2)
    return packed, dense


def pack_fp8(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """DeepSeek-V3 as published: every projection in 128 x 128 FP8 blocks, gate and head plain."""
    packed, dense = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("proj.weight") or "kv_a_proj_with_mqa" in name:
            weight = Fp8BlockWeight.quantize(tensor)
            packed[name], packed[f"{name}_scale_inv"] = weight.data, weight.scale_inv
            dense[name] = weight.dequantize()
    return packed, dense


def pack_fp8_tensor(
    tensors: dict[str, torch.Tensor], *, middle_scale: float = 0.02
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Experts with one scale per tensor, the rest plain. `middle_scale`: of what comes between the matrices."""
    packed = dict(tensors)
    for name, tensor in tensors.items():
        if ".experts." in name and name.endswith("proj.weight"):
            weight = Fp8TensorWeight.quantize(tensor)
            packed[name], packed[f"{name}_scale"] = weight.data, weight.scale
            scale = middle_scale if "down_proj" in name else 0.02
            packed[f"{name.removesuffix('.weight')}.input_scale"] = torch.tensor(scale)
    return packed, tensors


def pack_nvfp4(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """DeepSeek-V3 by ModelOpt: MLPs and experts in NVFP4, attention plain."""
    packed, dense = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if ".mlp." in name and name.endswith("proj.weight"):
            weight = Nvfp4Weight.quantize(tensor)
            prefix = name.removesuffix(".weight")
            packed[name], packed[f"{name}_scale"] = weight.codes, weight.scales
            packed[f"{name}_scale_2"] = weight.scale_2
            packed[f"{prefix}.input_scale"] = torch.tensor(0.01)
            dense[name] = weight.dequantize()
    return packed, dense


def set_weights(model: Any, tensors: dict[str, torch.Tensor], folder: Path) -> Any:
    """The same transformers model with other weights, through its own loader."""
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    loaded = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    (folder / "model.safetensors").unlink()
    return loaded
