"""Finds the modules of Triton kernels for a device. Imports Triton only if a GPU is used."""

import functools
import importlib
from types import ModuleType

import torch

from moe.backends.c_compiler import missing_for_triton

_MOST_NUMBERS = 1 << 26  # cuBLAS reads a larger matrix as fast, unless it has very many rows


def fused_kernels(device: torch.device) -> ModuleType | None:
    """`model.gpu_kernels`; None (use plain torch) where `kernel_module` has none."""
    return kernel_module("model.gpu_kernels", device)


def few_rows_kernel(weight: torch.Tensor) -> ModuleType | None:
    """`model.few_rows` if it multiplies a few rows by this matrix faster than cuBLAS, else None."""
    module = kernel_module("model.few_rows", weight.device) if weight.dtype == torch.bfloat16 else None
    if module is None or (weight.numel() > _MOST_NUMBERS and weight.shape[0] < module.MANY_OUTPUTS):
        return None
    return module


def kernel_module(name: str, device: torch.device) -> ModuleType | None:
    """The module of kernels; None on a CPU, and without Triton or its C compiler."""
    return _module(name) if device.type == "cuda" else None


@functools.cache
def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name) if missing_for_triton() is None else None
    except ImportError:
        return None
