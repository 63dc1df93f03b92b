"""E4M3 (FP8) arithmetic shared by the two FP8 formats and NVFP4's block scales. No weight class lives here."""

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-10  # an all-zero block gets a tiny scale instead of a division by zero


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round to nearest even after clamping to ±448: beyond it the bare cast saturates or gives NaN by device."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def amax_scale(amax: torch.Tensor) -> torch.Tensor:
    """fp32 scale that maps the largest magnitude to 448."""
    return amax.float().clamp_min(SMALLEST_AMAX) / E4M3_MAX
