"""NVFP4: E2M1 codes, two per byte along K (low nibble first), an E4M3 scale per 16 elements and an fp32 scale on top.

Source of the layout: checkpoints exported by ModelOpt. Block scales are row-major here, not swizzled.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from moe.errors import WeightFormatError
from moe.formats.base import axis_from_end, check_cut
from moe.formats.fp4 import decode_e2m1, encode_e2m1
from moe.formats.fp8 import E4M3, E4M3_MAX, SMALLEST_AMAX, to_e4m3
from moe.formats.per_tensor import check_scale, narrow_rows, spread_rows

GROUP = 16
E2M1_MAX = 6.0


@dataclass(frozen=True, slots=True)
class Nvfp4Weight:
    """`codes` u8 [..., N, K/2], `scales` e4m3 [..., N, K/16]; `scale_2`, `input_scale` fp32 per matrix or per half."""

    format_name: ClassVar[str] = "nvfp4"
    row_block: ClassVar[int] = 1
    col_block: ClassVar[int] = GROUP
    codes: torch.Tensor
    scales: torch.Tensor
    scale_2: torch.Tensor
    input_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, tensor, dtype in (("codes", self.codes, torch.uint8), ("scales", self.scales, E4M3)):
            if tensor.dtype != dtype:
                raise WeightFormatError(f"nvfp4 {name} must be {dtype}, got {tensor.dtype}")
        expected = (*self.shape[:-1], self.shape[-1] // GROUP)
        if self.shape[-1] % GROUP or tuple(self.scales.shape) != expected:
            raise WeightFormatError(
                f"nvfp4 codes {tuple(self.codes.shape)} need scales {expected} and a K that is a multiple of {GROUP}, "
                f"got scales {tuple(self.scales.shape)}"
            )
        check_scale("nvfp4 scale_2", self.scale_2, self.shape)
        check_scale("nvfp4 input_scale", self.input_scale, self.shape)

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
        """Bytes of codes and all scales."""
        tensors = (self.codes, self.scales, self.scale_2, self.input_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Dense [..., N, K]."""
        groups = decode_e2m1(self.codes).unflatten(-1, (-1, GROUP)) * self.scales.float()[..., None]
        return (groups.flatten(-2) * spread_rows(self.scale_2, self.shape)).to(dtype)

    def select(self, index: int) -> Self:
        """Entry `index` of the leading axis."""
        input_scale = None if self.input_scale is None else self.input_scale[index]
        return type(self)(self.codes[index], self.scales[index], self.scale_2[index], input_scale)

    def narrow(self, axis: int, start: int, length: int) -> Self:
        """A range along E, N or K; along K it must keep groups of 16 whole."""
        axis = axis_from_end(axis, self.codes.ndim)
        check_cut(self.format_name, axis, start, length, GROUP if axis == -1 else 1, self.shape[axis])
        scale_2, input_scale = self.scale_2, self.input_scale
        if axis == -1:
            codes = self.codes.narrow(-1, start // 2, length // 2)
            return type(self)(codes, self.scales.narrow(-1, start // GROUP, length // GROUP), scale_2, input_scale)
        if axis == -2:
            scale_2 = narrow_rows("nvfp4 scale_2", scale_2, self.shape, start, length)
            if input_scale is not None:
                input_scale = narrow_rows("nvfp4 input_scale", input_scale, self.shape, start, length)
        else:
            scale_2 = scale_2.narrow(0, start, length)
            input_scale = None if input_scale is None else input_scale.narrow(0, start, length)
        codes, scales = self.codes.narrow(axis, start, length), self.scales.narrow(axis, start, length)
        return type(self)(codes, scales, scale_2, input_scale)

    def to(self, device: torch.device) -> Self:
        """The same weight on another device."""
        input_scale = None if self.input_scale is None else self.input_scale.to(device)
        return type(self)(self.codes.to(device), self.scales.to(device), self.scale_2.to(device), input_scale)

    @classmethod
    def quantize(cls, dense: torch.Tensor, input_scale: torch.Tensor | None = None) -> Self:
        """Quantize [..., N, K] with `scale_2 = amax / (6 * 448)` per matrix."""
        dense = dense.float()
        amax = dense.abs().amax((-2, -1)).clamp_min(SMALLEST_AMAX)
        scale_2 = amax / (E2M1_MAX * E4M3_MAX)
        codes, scales = quantize_groups(dense, scale_2[..., None, None])
        return cls(codes, scales, scale_2, input_scale)


def quantize_groups(dense: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., K/2] and E4M3 scales [..., K/16] for a given fp32 `global_scale` that broadcasts to [..., K/16].

    A block whose scale rounds to zero gets zero codes.
    """
    groups = dense.unflatten(-1, (-1, GROUP))
    scales = to_e4m3(groups.abs().amax(-1) / E2M1_MAX / global_scale)
    factor = (scales.float() * global_scale)[..., None]
    scaled = torch.where(factor == 0, 0.0, groups / factor)
    return encode_e2m1(scaled).flatten(-2), scales
