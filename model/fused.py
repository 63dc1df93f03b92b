"""Finds the kernels of `model.gpu_kernels` and `model.few_rows` for a device. Imports Triton only if a GPU is used."""

import functools
import importlib
from types import ModuleType

import torch

from moe.backends.c_compiler import missing_for_triton

_MOST_NUMBERS = 1 << 26  # cuBLAS reads a larger matrix as fast as the memory allows


def fused_kernels(device: torch.device) -> ModuleType | None:
    """`model.gpu_kernels`; None (use plain torch) on a CPU, and without Triton or its C compiler."""
    return _module("model.gpu_kernels") if device.type == "cuda" else None


def few_rows_kernel(weight: torch.Tensor) -> ModuleType | None:
    """`model.few_rows` if it multiplies a few rows by this matrix faster than cuBLAS, else None."""
    is_for_it = weight.device.type == "cuda" and weight.dtype == torch.bfloat16 and weight.numel() <= _MOST_NUMBERS
    return _module("model.few_rows") if is_for_it else None


@functools.cache
def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name) if missing_for_triton() is None else None
    except ImportError:
        return None
