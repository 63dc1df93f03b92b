"""Activation quantization of GEMM inputs, as a round trip: quantize, then dequantize to fp32.

Every function takes `x` [T, K] and the canonical weight it is multiplied with (for a static input scale), and returns
fp32 [T, K].
"""

from collections.abc import Callable

import torch

from moe.errors import WeightFormatError
from moe.formats.base import Weight
from moe.formats.fp4 import decode_e2m1
from moe.formats.fp8 import amax_scale, to_e4m3
from moe.formats.mxfp4 import Mxfp4Weight, ScaleRule
from moe.formats.nvfp4 import GROUP, quantize_groups

ActivationQuant = Callable[[torch.Tensor, Weight], torch.Tensor]
_FP8_GROUP = 128


def fp8_groups(x_TK: torch.Tensor, weight: Weight) -> torch.Tensor:
    """E4M3 with a dynamic scale per token and group of 128; the last group may be short."""
    del weight
    groups = [_fp8_round(part, amax_scale(part.abs().amax(-1, keepdim=True))) for part in x_TK.split(_FP8_GROUP, -1)]
    return torch.cat(groups, dim=-1)


def fp8_tokens(x_TK: torch.Tensor, weight: Weight) -> torch.Tensor:
    """E4M3 with a dynamic scale per token."""
    del weight
    return _fp8_round(x_TK, amax_scale(x_TK.abs().amax(-1, keepdim=True)))


def mxfp4_groups(x_TK: torch.Tensor, weight: Weight) -> torch.Tensor:
    """MXFP4 with a dynamic exponent per token and group of 32, by `ScaleRule.EVEN`."""
    del weight
    return Mxfp4Weight.quantize(x_TK, ScaleRule.EVEN).dequantize()


def fp8_static(x_TK: torch.Tensor, weight: Weight) -> torch.Tensor:
    """E4M3 with the checkpoint's `input_scale`."""
    return _fp8_round(x_TK, _input_scale(weight))


def nvfp4_static(x_TK: torch.Tensor, weight: Weight) -> torch.Tensor:
    """NVFP4 with the checkpoint's `input_scale` above dynamic E4M3 scales per 16."""
    input_scale = _input_scale(weight)
    codes, scales = quantize_groups(x_TK.float(), input_scale)
    groups = decode_e2m1(codes).unflatten(-1, (-1, GROUP)) * scales.float()[..., None]
    return groups.flatten(-2) * input_scale


def _fp8_round(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return to_e4m3(x.float() / scale).float() * scale


def _input_scale(weight: Weight) -> torch.Tensor:
    """Static input scale, one number. Gate and up have the same input, so the larger of their two scales applies."""
    scale: torch.Tensor | None = getattr(weight, "input_scale", None)
    if scale is None:
        raise WeightFormatError(f"{weight.format_name} weight without input_scale: its input cannot be quantized")
    return scale.max()
