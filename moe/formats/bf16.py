"""Plain floating-point weights without scales. Named after the usual dtype; fp32 and fp16 work too."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from moe.errors import WeightFormatError
from moe.formats.base import axis_from_end, check_cut


@dataclass(frozen=True, slots=True)
class Bf16Weight:
    """`data` [..., N, K] in a floating dtype of at least 16 bits."""

    format_name: ClassVar[str] = "bf16"
    row_block: ClassVar[int] = 1
    col_block: ClassVar[int] = 1
    data: torch.Tensor

    def __post_init__(self) -> None:
        if self.data.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            raise WeightFormatError(f"a plain weight needs a floating dtype of 16 bits or more, got {self.data.dtype}")

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
        """Bytes of data."""
        return self.data.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Dense [..., N, K]."""
        return self.data.to(dtype)

    def select(self, index: int) -> Self:
        """Entry `index` of the leading axis."""
        return type(self)(self.data[index])

    def narrow(self, axis: int, start: int, length: int) -> Self:
        """A range along one axis."""
        axis = axis_from_end(axis, self.data.ndim)
        check_cut(self.format_name, axis, start, length, 1, self.data.shape[axis])
        return type(self)(self.data.narrow(axis, start, length))

    def to(self, device: torch.device) -> Self:
        """The same weight on another device."""
        return type(self)(self.data.to(device))

    @classmethod
    def quantize(cls, dense: torch.Tensor) -> Self:
        """Round a dense weight to bf16."""
        return cls(dense.to(torch.bfloat16))
