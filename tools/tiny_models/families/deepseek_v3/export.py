"""Trained weights as DeepSeek publishes them (FP8 blocks) and as ModelOpt does (NVFP4), with the other files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe.formats import Fp8BlockWeight
from moe.formats.nvfp4 import quantize_groups
from tools.tiny_models.families.base import Weights
from tools.tiny_models.families.deepseek_v3.dialect import BOS, EOS, FILES, PAD
from tools.tiny_models.families.deepseek_v3.model import BIAS, Shape
from tools.tiny_models.families.deepseek_v3.quant import E2M1_MAX, E4M3_MAX, global_scale

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NAMES = {"fp8": "tiny-deepseek-v3", "nvfp4": "tiny-deepseek-v3-nvfp4"}
SPARE = 1.0 / (E2M1_MAX * E4M3_MAX)  # from the largest input to ModelOpt's input_scale


def published(shape: Shape, weights: Weights) -> Weights:
    """Names as in the files: an expert's matrices one by one, embedding and head repeated in the prediction layer."""
    out: Weights = {}
    for name, value in weights.items():
        before, is_stacked, projection = name.partition(".mlp.experts.")
        if is_stacked:
            out |= {f"{before}.mlp.experts.{number}.{projection}.weight": part for number, part in enumerate(value)}
        else:
            out[name] = value
    ahead = f"model.layers.{shape.layers}."
    out[ahead + "embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    out[ahead + "shared_head.head.weight"] = weights["lm_head.weight"].clone()
    return out


def is_fp8(name: str) -> bool:
    """True for the projections of attention and MLPs; `name` is a file's or a stacked one."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    return last.endswith(("_proj", "_proj_with_mqa")) and last != "eh_proj"


def is_nvfp4(shape: Shape, name: str) -> bool:
    """True for the projections of MLPs in the model's own layers; ModelOpt leaves the rest in bf16."""
    return ".mlp." in name and is_fp8(name) and not name.startswith(f"model.layers.{shape.layers}.")


def fp8_tensors(shape: Shape, weights: Weights) -> Weights:
    """The tensors of the FP8 file."""
    out: Weights = {}
    for name, value in published(shape, weights).items():
        if is_fp8(name):
            packed = Fp8BlockWeight.quantize(value.float())
            out[name], out[f"{name}_scale_inv"] = packed.data, packed.scale_inv
        else:
            out[name] = plain(name, value)
    return out


def nvfp4_tensors(shape: Shape, weights: Weights, largest_inputs: Weights) -> Weights:
    """The tensors of the NVFP4 file. `largest_inputs`: of each quantized projection, by the stacked name."""
    names = published(shape, weights)
    inputs = {name: value * SPARE for name, value in published_inputs(largest_inputs)}
    out: Weights = {}
    for name, value in names.items():
        if not is_nvfp4(shape, name):
            out[name] = plain(name, value)
            continue
        prefix = name.removesuffix(".weight")
        partner = name.replace("up_proj", "gate_proj") if "up_proj" in name else name.replace("gate_proj", "up_proj")
        scale = global_scale(value, names[partner]).squeeze()
        out[name], out[f"{name}_scale"] = quantize_groups(value.float(), scale)
        out[f"{name}_scale_2"] = scale
        out[f"{prefix}.input_scale"] = inputs[prefix.replace("up_proj", "gate_proj")].clone()
    return out


def published_inputs(largest_inputs: Weights) -> Iterator[tuple[str, Tensor]]:
    """Largest inputs by a file's names: one number for each expert."""
    for name, value in largest_inputs.items():
        before, is_stacked, projection = name.partition(".mlp.experts.")
        if is_stacked:
            every = value.expand_as(largest_inputs[f"{before}.mlp.experts.down_proj"])
            for number, own in enumerate(every):
                yield f"{before}.mlp.experts.{number}.{projection}", own.clone()
        else:
            yield name, value


def plain(name: str, value: Tensor) -> Tensor:
    """bf16, and fp32 for the correction bias."""
    return value.float() if name.endswith(BIAS) else value.to(torch.bfloat16)


def config_of(kind: str) -> dict[str, Any]:
    """config.json; ModelOpt's exports keep quantization in a file of its own."""
    config: dict[str, Any] = json.loads((FILES / "config.json").read_text())
    return config | ({"quantization_config": FP8} if kind == "fp8" else {})


def modelopt_config(shape: Shape) -> dict[str, Any]:
    """hf_quant_config.json."""
    ignored = ["lm_head", "model.embed_tokens", "model.layers.*.self_attn*", "model.layers.*.mlp.gate"]
    quantization = {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
        "exclude_modules": [*ignored, f"model.layers.{shape.layers}*"],
    }  # fmt: skip
    return {"producer": {"name": "modelopt"}, "quantization": quantization}


def write_folder(folder: Path, kind: str, shape: Shape, tensors: Weights) -> None:
    """Weights, configs, tokenizer and template of one model."""
    folder.mkdir(parents=True, exist_ok=True)
    jsons = {"config.json": config_of(kind), "special_tokens_map.json": {
        "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
    }}  # fmt: skip
    if kind == "nvfp4":
        jsons["hf_quant_config.json"] = modelopt_config(shape)
    for name, content in jsons.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(FILES / name, folder / name)
    ready = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(ready, folder / "model.safetensors", metadata={"format": "pt"})
