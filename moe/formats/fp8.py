"""E4M3 (FP8) arithmetic shared by the two FP8 formats and NVFP4's block scales. No weight class lives here.

MI300 (gfx942) uses an older variant, fnuz: the same bits mean half the value, and the bits of -0 mean NaN.
"""

import torch

from moe.device import rocm_arch

E4M3 = torch.float8_e4m3fn
FNUZ = torch.float8_e4m3fnuz
FNUZ_FACTOR = 2.0  # factor for the scales when codes become fnuz
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-10  # an all-zero block gets a tiny scale instead of a division by zero


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round to nearest even after clamping to ±448. Without the clamp, some devices saturate and others give NaN."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def amax_scale(amax: torch.Tensor) -> torch.Tensor:
    """fp32 scale that maps the largest magnitude to 448."""
    return amax.float().clamp_min(SMALLEST_AMAX) / E4M3_MAX


def to_fnuz(codes: torch.Tensor) -> torch.Tensor:
    """The bits of e4m3fn codes as e4m3fnuz, whose values are half as large: scales must double. -0 becomes 0."""
    octets = codes.view(torch.uint8)
    return octets.masked_fill(octets == 0x80, 0).view(FNUZ)


def device_e4m3(device: torch.device) -> torch.dtype:
    """The E4M3 variant of an AMD GPU."""
    return FNUZ if rocm_arch(device) == "gfx942" else E4M3
