"""MXFP4: E2M1 codes, two per byte along K (low nibble first), one E8M0 exponent byte per 32 elements.

Source of the layout: OCP Microscaling Formats 1.0 and the published GPT-OSS checkpoints.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from moe.errors import WeightFormatError
from moe.formats.base import check_cut
from moe.formats.fp4 import decode_e2m1, encode_e2m1

GROUP = 32
E8M0_BIAS = 127


def e8m0_to_float(scales: torch.Tensor) -> torch.Tensor:
    """Exponent bytes to fp32 powers of two; byte 255 is NaN. Exact, also for byte 0 (2^-127, a subnormal)."""
    exponents = scales.to(torch.int32) - E8M0_BIAS
    values = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return values.masked_fill(scales == 255, float("nan"))


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """`codes` u8 [..., N, K/2] and `scales` u8 [..., N, K/32]."""

    format_name: ClassVar[str] = "mxfp4"
    row_block: ClassVar[int] = 1
    col_block: ClassVar[int] = GROUP
    codes: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        for name, tensor in (("codes", self.codes), ("scales", self.scales)):
            if tensor.dtype != torch.uint8:
                raise WeightFormatError(f"mxfp4 {name} must be uint8, got {tensor.dtype}")
        expected = (*self.codes.shape[:-1], self.codes.shape[-1] * 2 // GROUP)
        if self.codes.shape[-1] * 2 % GROUP or tuple(self.scales.shape) != expected:
            raise WeightFormatError(
                f"mxfp4 codes {tuple(self.codes.shape)} need scales {expected} and a K that is a multiple of {GROUP}, "
                f"got scales {tuple(self.scales.shape)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K]."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 2)

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Dense [..., N, K]."""
        groups = decode_e2m1(self.codes).unflatten(-1, (-1, GROUP))
        return (groups * e8m0_to_float(self.scales)[..., None]).flatten(-2).to(dtype)

    def select(self, index: int) -> Self:
        """Entry `index` of the leading axis."""
        return type(self)(self.codes[index], self.scales[index])

    def narrow(self, axis: int, start: int, length: int) -> Self:
        """A range along E, N or K; along K it must keep groups of 32 whole."""
        size = self.shape[axis]
        is_last = axis in (-1, len(self.shape) - 1)
        check_cut(self.format_name, axis, start, length, GROUP if is_last else 1, size)
        if not is_last:
            return type(self)(self.codes.narrow(axis, start, length), self.scales.narrow(axis, start, length))
        codes = self.codes.narrow(-1, start // 2, length // 2)
        return type(self)(codes, self.scales.narrow(-1, start // GROUP, length // GROUP))

    def to(self, device: torch.device) -> Self:
        """The same weight on another device."""
        return type(self)(self.codes.to(device), self.scales.to(device))

    @classmethod
    def quantize(cls, dense: torch.Tensor) -> Self:
        """Quantize [..., N, K] with the scale rule `2^(floor(log2 amax) - 2)` (OCP text; saturates at 6)."""
        groups = dense.float().unflatten(-1, (-1, GROUP))
        amax = groups.abs().amax(-1)
        exponents = torch.frexp(amax).exponent - 3  # frexp's mantissa lies in [0.5, 1)
        exponents = exponents.masked_fill(amax == 0, -E8M0_BIAS).clamp(-E8M0_BIAS, E8M0_BIAS)
        scaled = torch.ldexp(groups, -exponents[..., None])
        return cls(encode_e2m1(scaled).flatten(-2), (exponents + E8M0_BIAS).to(torch.uint8))
