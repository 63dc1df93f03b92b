"""Number formats as the kernels read and write them, written down independently of moe.formats."""

import itertools

import torch

from tests.emulators.refusal import need

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_VALUES = torch.tensor(E2M1)
_PAIRS = torch.stack((_VALUES.repeat(16), _VALUES.repeat_interleave(16)), dim=-1)  # one entry per byte
_WORDS = _PAIRS.view(torch.int64).flatten()  # the same as one word each, which is looked up in a tenth of the time


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """u8 [..., C] to fp32 [..., 2C]; the low nibble is the even element."""
    numbers = _WORDS.index_select(0, packed.flatten().int()).view(torch.float32)
    return numbers.view(*packed.shape[:-1], 2 * packed.shape[-1])


def e8m0_values(scales: torch.Tensor) -> torch.Tensor:
    """Exponent bytes to powers of two."""
    return torch.pow(2.0, scales.double() - 127).float()


def mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return fp4_values(codes) * e8m0_values(scales).repeat_interleave(32, dim=-1)


def nvfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Without any global factor."""
    return fp4_values(codes) * scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, dim=-1)


def fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """fp32 [..., K] to u8 [..., K/2]: nearest, ties to the even code, saturating."""
    middles = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(E2M1[:8])])
    magnitude = values.abs().contiguous()
    lower = torch.searchsorted(middles, magnitude)  # on a tie the code below
    is_tie = middles[lower.clamp(max=6)] == magnitude
    codes = lower + (is_tie & (lower % 2 == 1)).long() + 8 * torch.signbit(values).long()
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def quantize_nvfp4(x: torch.Tensor, multiplier: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, e4m3 scales): sf = e4m3(multiplier * amax / 6), q = e2m1(x * multiplier / sf)."""
    groups = x.float().unflatten(-1, (-1, 16))
    scales = (multiplier * groups.abs().amax(-1) / 6).clamp(max=448.0).to(torch.float8_e4m3fn)
    safe = scales.float().masked_fill(scales.float() == 0, float("inf"))
    return fp4_codes((groups * multiplier / safe[..., None]).flatten(-2)), scales


def fake_nvfp4(x: torch.Tensor, multiplier: torch.Tensor | float) -> torch.Tensor:
    """x through NVFP4 and back to its own magnitude."""
    codes, scales = quantize_nvfp4(x, multiplier)
    return nvfp4(codes, scales) / multiplier


def fake_fp8(x: torch.Tensor, multiplier: torch.Tensor | float) -> torch.Tensor:
    """x * multiplier through e4m3 and back."""
    return (x * multiplier).clamp(-448, 448).to(torch.float8_e4m3fn).float() / multiplier


def fake_fp8_groups(x: torch.Tensor) -> torch.Tensor:
    """x through e4m3 with one scale per 128 columns; an all-zero group stays zero."""
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return (fake_fp8(groups / scale, 1.0) * scale).flatten(-2)


def expand_blocks(scales: torch.Tensor) -> torch.Tensor:
    """One scale per 128 x 128 block to one per element."""
    return scales.repeat_interleave(128, dim=-2).repeat_interleave(128, dim=-1)


def fp8_block(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 of e4m3 [E, rows, columns] in 128 x 128 blocks, after checks."""
    num_experts, num_rows, num_cols = codes.shape
    need(codes.dtype == torch.float8_e4m3fn and codes.is_contiguous(), "contiguous e4m3 weights")
    need(num_rows % 128 == 0 and num_cols % 128 == 0, "whole 128 x 128 blocks")
    need(scales.dtype == torch.float32 and scales.is_contiguous(), "contiguous fp32 scales")
    need(scales.shape == (num_experts, num_rows // 128, num_cols // 128), "one scale per block, not transposed")
    return codes.float() * expand_blocks(scales)
