"""FP8 with one fp32 scale per 128 x 128 block, as DeepSeek-V3 publishes it. Only the last block of a side is short.

The scale is called `scale_inv` as in the checkpoint, but data is multiplied by it.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from moe.errors import WeightFormatError
from moe.formats.base import axis_from_end, check_cut
from moe.formats.fp8 import E4M3, amax_scale, to_e4m3

BLOCK = 128


def _num_blocks(size: int) -> int:
    return -(-size // BLOCK)


@dataclass(frozen=True, slots=True)
class Fp8BlockWeight:
    """`data` e4m3 [..., N, K] and `scale_inv` fp32 [..., ceil(N/128), ceil(K/128)]."""

    format_name: ClassVar[str] = "fp8_block"
    row_block: ClassVar[int] = BLOCK
    col_block: ClassVar[int] = BLOCK
    data: torch.Tensor
    scale_inv: torch.Tensor

    def __post_init__(self) -> None:
        for name, tensor, dtype in (("data", self.data, E4M3), ("scale_inv", self.scale_inv, torch.float32)):
            if tensor.dtype != dtype:
                raise WeightFormatError(f"fp8_block {name} must be {dtype}, got {tensor.dtype}")
        *lead, num_rows, num_cols = self.data.shape
        expected = (*lead, _num_blocks(num_rows), _num_blocks(num_cols))
        if tuple(self.scale_inv.shape) != expected:
            raise WeightFormatError(
                f"fp8_block data {tuple(self.data.shape)} needs scale_inv {expected}, got {tuple(self.scale_inv.shape)}"
            )

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
        return self.data.nbytes + self.scale_inv.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Dense [..., N, K]."""
        return (self.data.float() * _spread(self.scale_inv, *self.shape[-2:])).to(dtype)

    def select(self, index: int) -> Self:
        """Entry `index` of the leading axis."""
        return type(self)(self.data[index], self.scale_inv[index])

    def narrow(self, axis: int, start: int, length: int) -> Self:
        """A range along E, N or K; along N and K it must keep blocks of 128 whole."""
        axis = axis_from_end(axis, self.data.ndim)
        block = BLOCK if axis >= -2 else 1
        check_cut(self.format_name, axis, start, length, block, self.shape[axis])
        scale_inv = self.scale_inv.narrow(axis, start // block, -(-length // block))
        return type(self)(self.data.narrow(axis, start, length), scale_inv)

    def to(self, device: torch.device) -> Self:
        """The same weight on another device."""
        return type(self)(self.data.to(device), self.scale_inv.to(device))

    @classmethod
    def quantize(cls, dense: torch.Tensor) -> Self:
        """Quantize [..., N, K] with `scale = amax / 448` per block."""
        dense = dense.float()
        num_rows, num_cols = dense.shape[-2:]
        row_blocks, col_blocks = _num_blocks(num_rows), _num_blocks(num_cols)
        padding = (0, col_blocks * BLOCK - num_cols, 0, row_blocks * BLOCK - num_rows)
        blocks = torch.nn.functional.pad(dense, padding).unflatten(-1, (col_blocks, BLOCK))
        scale_inv = amax_scale(blocks.unflatten(-3, (row_blocks, BLOCK)).abs().amax((-3, -1)))
        return cls(to_e4m3(dense / _spread(scale_inv, num_rows, num_cols)), scale_inv)


def _spread(scales: torch.Tensor, num_rows: int, num_cols: int) -> torch.Tensor:
    """One scale per element, [..., N, K], cut at the ragged edge."""
    rows = scales.repeat_interleave(BLOCK, -2)[..., :num_rows, :]
    return rows.repeat_interleave(BLOCK, -1)[..., :num_cols]
