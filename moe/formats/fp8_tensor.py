"""FP8 with one fp32 scale per matrix (or per half of [gate; up]), and optionally a static scale of the input."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from moe.errors import WeightFormatError
from moe.formats.base import axis_from_end, check_cut
from moe.formats.fp8 import E4M3, amax_scale, to_e4m3
from moe.formats.per_tensor import check_scale, narrow_rows, spread_rows


@dataclass(frozen=True, slots=True)
class Fp8TensorWeight:
    """`data` e4m3 [..., N, K]; `scale` and `input_scale` fp32, shaped like the leading axes (or [..., 2], per half)."""

    format_name: ClassVar[str] = "fp8_tensor"
    row_block: ClassVar[int] = 1
    col_block: ClassVar[int] = 1
    data: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.data.dtype != E4M3:
            raise WeightFormatError(f"fp8_tensor data must be {E4M3}, got {self.data.dtype}")
        check_scale("fp8_tensor scale", self.scale, self.shape)
        check_scale("fp8_tensor input_scale", self.input_scale, self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K]."""
        return tuple(self.data.shape)

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + self.scale.nbytes + (0 if self.input_scale is None else self.input_scale.nbytes)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Dense [..., N, K]."""
        return (self.data.float() * spread_rows(self.scale, self.shape)).to(dtype)

    def select(self, index: int) -> Self:
        """Entry `index` of the leading axis."""
        input_scale = None if self.input_scale is None else self.input_scale[index]
        return type(self)(self.data[index], self.scale[index], input_scale)

    def narrow(self, axis: int, start: int, length: int) -> Self:
        """A range along E, N or K."""
        axis = axis_from_end(axis, self.data.ndim)
        check_cut(self.format_name, axis, start, length, 1, self.shape[axis])
        data = self.data.narrow(axis, start, length)
        scale, input_scale = self.scale, self.input_scale
        if axis == -2:
            scale = narrow_rows("fp8_tensor scale", scale, self.shape, start, length)
            if input_scale is not None:
                input_scale = narrow_rows("fp8_tensor input_scale", input_scale, self.shape, start, length)
        elif axis < -2:
            scale = scale.narrow(0, start, length)
            input_scale = None if input_scale is None else input_scale.narrow(0, start, length)
        return type(self)(data, scale, input_scale)

    def to(self, device: torch.device) -> Self:
        """The same weight on another device."""
        input_scale = None if self.input_scale is None else self.input_scale.to(device)
        return type(self)(self.data.to(device), self.scale.to(device), input_scale)

    @classmethod
    def quantize(cls, dense: torch.Tensor, input_scale: torch.Tensor | None = None) -> Self:
        """Quantize [..., N, K] with `scale = amax / 448` per matrix."""
        dense = dense.float()
        scale = amax_scale(dense.abs().amax((-2, -1)))
        return cls(to_e4m3(dense / scale[..., None, None]), scale, input_scale)
