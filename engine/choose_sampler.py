"""Chooses between the sampling kernels and plain torch. Imports Triton only if a GPU is used."""

import torch

from engine.sampler import Sampler, TorchSampler
from model.fused import kernel_module

_MOST_TOKENS = 2**19  # of a vocabulary: its whole mass fits into 64 bits


def make_sampler(tokens_M: torch.Tensor, vocab_size: int) -> Sampler:
    """The sampler for the device of `tokens_M`: torch on a CPU, and without Triton or its C compiler."""
    kernels = kernel_module("engine.gpu_sampler", tokens_M.device) if vocab_size <= _MOST_TOKENS else None
    if kernels is None:
        return TorchSampler(tokens_M)
    sampler: Sampler = kernels.GpuSampler(tokens_M, vocab_size)
    return sampler
