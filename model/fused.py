"""Finds the fused kernels of `model.gpu_kernels` for a device. Imports Triton only if a GPU is used."""

import functools
import importlib
from types import ModuleType

import torch

from moe.backends.c_compiler import missing_for_triton


def fused_kernels(device: torch.device) -> ModuleType | None:
    """The module with the kernels; None (use plain torch) on a CPU, and without Triton or its C compiler."""
    return _module() if device.type == "cuda" else None


@functools.cache
def _module() -> ModuleType | None:
    try:
        return importlib.import_module("model.gpu_kernels") if missing_for_triton() is None else None
    except ImportError:
        return None
