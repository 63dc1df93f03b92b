"""E2M1 codes (FP4) to numbers and back; two codes per byte, low nibble first. Shared by MXFP4 and NVFP4."""

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbours. A tie goes to the even code, so odd midpoints belong to the upper code.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

_BY_CODE = E2M1_VALUES + tuple(-value for value in E2M1_VALUES)
_PAIRS = torch.tensor([_BY_CODE[half] for byte in range(256) for half in (byte & 0xF, byte >> 4)]).view(torch.int64)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """u8 [..., K/2] to fp32 [..., K]. One look-up brings both numbers of a byte, as one word of 64 bits."""
    numbers = _PAIRS.to(packed.device).index_select(0, packed.flatten().int()).view(torch.float32)
    return numbers.view(*packed.shape[:-1], 2 * packed.shape[-1])


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """[..., K] to u8 [..., K/2]: saturate at ±6, round to nearest, ties to the even code; the sign of zero is kept."""
    magnitude = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for index, midpoint in enumerate(_MIDPOINTS):
        codes += (magnitude >= midpoint) if index % 2 else (magnitude > midpoint)
    codes |= torch.signbit(values).to(torch.uint8) << 3
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
