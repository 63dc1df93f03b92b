"""MXFP4 with straight-through gradients; the trainer's rounding and the exporter's packing are this one function.

Shapes: w [..., K] in blocks of 32 along K; codes u8 [..., K/32, 16] (low nibble first); scales u8 [..., K/32].
"""

from __future__ import annotations

import torch
from torch import Tensor

from tools.tiny_models.rounding import round_e2m1, through

BLOCK = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def block_exponents(w_blocks: Tensor) -> Tensor:
    """The power of two for each block [..., 1]: of the two that fit its largest value the one with less error."""
    top = w_blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    low = torch.frexp(top).exponent - 3  # floor(log2(top)) - 2: values above 6 saturate
    errors = []
    for exponent in (low, low + 1):
        scale = torch.exp2(exponent.to(w_blocks.dtype))
        errors.append(((round_e2m1(w_blocks / scale) * scale - w_blocks) ** 2).sum(-1, keepdim=True))
    return torch.where(errors[1] < errors[0], low + 1, low)


def quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """E2M1 values [..., K/32, 32] and exponents [..., K/32, 1] of fp32 weights."""
    w_blocks = w.unflatten(-1, (-1, BLOCK))
    exponents = block_exponents(w_blocks)
    return round_e2m1(w_blocks / torch.exp2(exponents.to(w.dtype))), exponents


def fake_quantize(w: Tensor) -> Tensor:
    """The weights as the exported file holds them."""
    values, exponents = quantize(w)
    return (values * torch.exp2(exponents.to(w.dtype))).flatten(-2)


def straight_through(w: Tensor) -> Tensor:
    """Forward: what the file holds. Backward: as if nothing was rounded."""
    return through(w, fake_quantize(w))


def pack(w: Tensor) -> tuple[Tensor, Tensor]:
    """`_blocks` and `_scales` of the published format."""
    values, exponents = quantize(w.float())
    table = torch.tensor(VALUES, dtype=torch.float32, device=w.device)
    codes = torch.searchsorted(table, values.abs().contiguous()).to(torch.uint8)
    codes |= (torch.signbit(values).to(torch.uint8)) << 3
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed.contiguous(), (exponents.squeeze(-1) + 127).to(torch.uint8)
