"""Whether a device has the fused kernels of `model.gpu_kernels`. Imports Triton only for a GPU that is used."""

import functools
import importlib
from types import ModuleType

import torch


def fused_kernels(device: torch.device) -> ModuleType | None:
    """The module with the kernels, None where plain torch has to do: on a CPU, or without Triton."""
    return _module() if device.type == "cuda" else None


@functools.cache
def _module() -> ModuleType | None:
    try:
        return importlib.import_module("model.gpu_kernels")
    except ImportError:
        return None
