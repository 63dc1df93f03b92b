"""Dynamic FP8 quantization of activations, for kernels that want it done before the call. Plain torch."""

import torch

from moe.formats.fp8 import amax_scale, to_e4m3

GROUP = 128


def quantize_fp8_groups(x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [T, K], fp32 scales [T, K/128]): one scale per token and group of 128 columns, which must divide K."""
    groups = x_TK.float().unflatten(-1, (-1, GROUP))
    scales = amax_scale(groups.abs().amax(-1))
    return to_e4m3(groups / scales[..., None]).flatten(-2), scales
