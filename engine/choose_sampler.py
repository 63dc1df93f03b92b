"""Chooses between the sampling kernels and plain torch. Imports Triton only if a GPU is used."""

import importlib

import torch

from engine.sampler import Sampler, TorchSampler
from moe.backends.c_compiler import missing_for_triton

_MOST_TOKENS = 2**19  # of a vocabulary: its whole mass fits into 64 bits


def make_sampler(tokens_M: torch.Tensor, vocab_size: int) -> Sampler:
    """The sampler for the device of `tokens_M`: torch on a CPU, and without Triton or its C compiler."""
    if tokens_M.device.type == "cuda" and vocab_size <= _MOST_TOKENS and missing_for_triton() is None:
        try:
            kernels = importlib.import_module("engine.gpu_sampler")
        except ImportError:
            return TorchSampler(tokens_M)
        sampler: Sampler = kernels.GpuSampler(tokens_M, vocab_size)
        return sampler
    return TorchSampler(tokens_M)
