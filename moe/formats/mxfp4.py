"""MXFP4: E2M1 codes, two per byte along K (low nibble first), one E8M0 exponent byte per 32 elements.

Source of the layout: OCP Microscaling Formats 1.0 and the published GPT-OSS checkpoints.
"""

import enum
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from moe.errors import WeightFormatError
from moe.formats.base import axis_from_end, check_cut
from moe.formats.fp4 import decode_e2m1, encode_e2m1

GROUP = 32
E8M0_BIAS = 127


def e8m0_to_float(scales: torch.Tensor) -> torch.Tensor:
    """Exponent bytes to fp32 powers of two; byte 255 is NaN. Exact, also for byte 0 (2^-127, a subnormal)."""
    exponents = scales.to(torch.int32) - E8M0_BIAS
    values = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return values.masked_fill(scales == 255, float("nan"))


class ScaleRule(enum.Enum):
    """How quantizing derives the block exponent from the block's largest magnitude."""

    FLOOR = "floor"  # 2^(floor(log2 amax) - 2): the OCP text; values above 6 saturate
    CEIL = "ceil"  # 2^ceil(log2(amax / 6)): nothing saturates
    EVEN = "even"  # like FLOOR after rounding amax to a two-bit mantissa


def mx_exponents(amax: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """int32 block exponents in -127..127; the scale byte is the exponent plus 127. Zero blocks get -127."""
    bits = amax.float().view(torch.int32)
    if rule is ScaleRule.EVEN:
        bits = bits + 0x200000
    floor = torch.frexp(bits.view(torch.float32)).exponent - 1  # frexp's mantissa lies in [0.5, 1)
    exponents = floor - 2
    if rule is ScaleRule.CEIL:
        exponents = exponents + (amax > 6.0 * torch.ldexp(torch.ones_like(amax), exponents)).int()
    return exponents.masked_fill(amax == 0, -E8M0_BIAS).clamp(-E8M0_BIAS, E8M0_BIAS)


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
        axis = axis_from_end(axis, self.codes.ndim)
        check_cut(self.format_name, axis, start, length, GROUP if axis == -1 else 1, self.shape[axis])
        if axis != -1:
            return type(self)(self.codes.narrow(axis, start, length), self.scales.narrow(axis, start, length))
        codes = self.codes.narrow(-1, start // 2, length // 2)
        return type(self)(codes, self.scales.narrow(-1, start // GROUP, length // GROUP))

    def to(self, device: torch.device) -> Self:
        """The same weight on another device."""
        return type(self)(self.codes.to(device), self.scales.to(device))

    @classmethod
    def quantize(cls, dense: torch.Tensor, rule: ScaleRule = ScaleRule.FLOOR) -> Self:
        """Quantize [..., N, K]."""
        groups = dense.float().unflatten(-1, (-1, GROUP))
        exponents = mx_exponents(groups.abs().amax(-1), rule)
        scaled = torch.ldexp(groups, -exponents[..., None])
        return cls(encode_e2m1(scaled).flatten(-2), (exponents + E8M0_BIAS).to(torch.uint8))
