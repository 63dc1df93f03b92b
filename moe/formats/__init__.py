"""Canonical weights, one class per number format, with quantize and dequantize in plain torch."""

from moe.formats.base import ExpertWeights, Weight
from moe.formats.bf16 import Bf16Weight
from moe.formats.mxfp4 import Mxfp4Weight

__all__ = ["Bf16Weight", "ExpertWeights", "Mxfp4Weight", "Weight"]
