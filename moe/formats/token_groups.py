"""Quantizes activations to E4M3 with one fp32 scale per token and group of 128 columns.

Used to dispatch tokens, and between the two GEMMs of DeepGEMM. A UE8M0 scale is a power of two, kept in fp32 until it
is packed: four exponent bytes in one int32, the lowest group in the lowest byte.
"""

import torch

from moe.formats.fp8 import amax_scale, to_e4m3

GROUP = 128


def quantize_token_groups(x: torch.Tensor, *, ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., K] to (e4m3 [..., K], fp32 [..., K/128]); K must be a multiple of 128."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    scales = amax_scale(groups.abs().amax(-1))
    if ue8m0:
        scales = round_up_to_power_of_two(scales)
    return to_e4m3(groups / scales[..., None]).flatten(-2), scales


def dequantize_token_groups(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 [..., K]."""
    return (codes.float().unflatten(-1, (-1, GROUP)) * scales[..., None]).flatten(-2)


def round_up_to_power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """The smallest power of two >= each positive scale; exact."""
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())


def pack_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Power-of-two fp32 [..., G] to int32 [..., ceil(G/4)]; missing groups get byte 0."""
    exponents = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    padded = torch.nn.functional.pad(exponents, (0, -scales.shape[-1] % 4))
    return padded.contiguous().view(torch.int32)


def unpack_ue8m0(packed: torch.Tensor, num_groups: int) -> torch.Tensor:
    """int32 [..., ceil(G/4)] to fp32 [..., G]."""
    octets = packed.clone(memory_format=torch.contiguous_format)  # where G is at most 4 any stride counts as contiguous
    exponents = octets.view(torch.uint8)[..., :num_groups].to(torch.int32)
    return (exponents << 23).view(torch.float32)
