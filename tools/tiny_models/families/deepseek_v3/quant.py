"""NVFP4 in the forward pass of training and evaluation: the values that `export.py` packs, with gradients.

Shapes: w [..., N, K]. The results equal what `moe.formats` dequantizes; a test holds them to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tools.tiny_models.rounding import round_e2m1, through

E4M3_MAX, E2M1_MAX, GROUP = 448.0, 6.0, 16
SMALLEST_AMAX = 1e-10


def round_e4m3(x: Tensor) -> Tensor:
    """The nearest E4M3 value; magnitudes above 448 become 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def global_scale(*parts: Tensor) -> Tensor:
    """NVFP4's scalar for matrices [..., N, K] that share one: amax / (6 * 448), shape [..., 1, 1]."""
    amax = torch.stack([part.detach().abs().amax((-2, -1), keepdim=True) for part in parts]).amax(0)
    return amax.float().clamp_min(SMALLEST_AMAX) / (E2M1_MAX * E4M3_MAX)


def fake_nvfp4(x: Tensor, scale: Tensor) -> Tensor:
    """x [..., K] as NVFP4 holds it; `scale` is the fp32 scalar, broadcastable to [..., K / 16]."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    block = round_e4m3(groups.abs().amax(-1) / E2M1_MAX / scale) * scale
    factor = block[..., None]
    values = round_e2m1(torch.where(factor == 0, 0.0, groups / torch.where(factor == 0, 1.0, factor)))
    return (values * factor).flatten(-2).to(x.dtype)


def nvfp4_pair(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up projections, which share their scalar; gradients pass."""
    scale = global_scale(gate, up)
    return through(gate, fake_nvfp4(gate.detach(), scale)), through(up, fake_nvfp4(up.detach(), scale))


def nvfp4_one(w: Tensor) -> Tensor:
    """A matrix with a scalar of its own; gradients pass."""
    return through(w, fake_nvfp4(w.detach(), global_scale(w)))


def rounded_inputs(x: Tensor, scale: Tensor | None) -> Tensor:
    """Activations [..., K] as an FP4 kernel takes them; a scale of 0 stands for that of the tensor itself.

    Without a scale nothing is rounded.
    """
    if scale is None:
        return x
    own = x.detach().abs().amax().float().clamp_min(SMALLEST_AMAX) / (E2M1_MAX * E4M3_MAX)
    return through(x, fake_nvfp4(x.detach(), torch.where(scale > 0, scale, own)))
