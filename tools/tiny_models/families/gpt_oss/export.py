"""Trained weights as GPT-OSS publishes them: MXFP4 experts, everything else bf16."""

from __future__ import annotations

import torch

from moe.formats import Mxfp4Weight
from tools.tiny_models.families.base import Weights
from tools.tiny_models.families.gpt_oss.model import EXPERT_WEIGHTS
from tools.tiny_models.families.gpt_oss.quant import fake_quantize, pack


def is_expert(name: str) -> bool:
    return name.endswith(EXPERT_WEIGHTS)


def as_exported(weights: Weights) -> Weights:
    """fp32 weights with the values that the exported file holds."""
    return {
        name: fake_quantize(value.float()) if is_expert(name) else value.to(torch.bfloat16).float()
        for name, value in weights.items()
    }


def unpacked(tensors: Weights) -> Weights:
    """fp32 weights of the published tensors."""
    out: Weights = {}
    for name, value in tensors.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            out[stem] = Mxfp4Weight(value.flatten(-2), tensors[f"{stem}_scales"]).dequantize()
        elif not name.endswith("_scales"):
            out[name] = value.float()
    return out


def packed(weights: Weights) -> Weights:
    """The tensors of the published format."""
    out: Weights = {}
    for name, value in weights.items():
        if is_expert(name):
            out[name + "_blocks"], out[name + "_scales"] = pack(value)
        else:
            out[name] = value.to(torch.bfloat16)
    return {name: value.cpu().contiguous() for name, value in out.items()}
