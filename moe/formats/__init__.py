"""Canonical weights, one class per number format, with quantize and dequantize in plain torch."""

from moe.formats.base import ExpertWeights, Weight
from moe.formats.bf16 import Bf16Weight
from moe.formats.fp8_block import Fp8BlockWeight
from moe.formats.fp8_tensor import Fp8TensorWeight
from moe.formats.mxfp4 import Mxfp4Weight
from moe.formats.nvfp4 import Nvfp4Weight

_KINDS: tuple[type[Weight], ...] = (Bf16Weight, Fp8BlockWeight, Fp8TensorWeight, Mxfp4Weight, Nvfp4Weight)
FORMATS = {kind.format_name: kind for kind in _KINDS}

__all__ = [
    "FORMATS",
    "Bf16Weight",
    "ExpertWeights",
    "Fp8BlockWeight",
    "Fp8TensorWeight",
    "Mxfp4Weight",
    "Nvfp4Weight",
    "Weight",
]
