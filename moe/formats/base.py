"""The interface of canonical weights in every number format, and the record of one layer's experts.

A weight is `[..., N, K]`: N output rows, K the reduction axis; experts are the leading axis E. Scales are part of the
weight, so data cannot exist without them.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol, Self, runtime_checkable

import torch

from moe.errors import WeightFormatError


@runtime_checkable
class Weight(Protocol):
    """One canonical weight matrix, or a stack of them."""

    format_name: ClassVar[str]
    row_block: ClassVar[int]  # a shard of N must start and end on a multiple of this (or at the ragged end)
    col_block: ClassVar[int]  # the same along K

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K], counted in elements."""

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Dense [..., N, K]; computed in fp32, cast last."""

    def select(self, index: int) -> Self:
        """Entry `index` of the leading axis, as views."""

    def narrow(self, axis: int, start: int, length: int) -> Self:
        """A range along E (axis 0 of a stack), N (-2) or K (-1), as views where possible.

        Raises:
            WeightFormatError: a cut along N or K that splits a scale block.
        """

    def to(self, device: torch.device) -> Self:
        """The same weight on another device."""


def axis_from_end(axis: int, num_dims: int) -> int:
    """Axis counted from the end: -1 for K, -2 for N, lower for a leading axis."""
    if not -num_dims <= axis < num_dims:
        raise WeightFormatError(f"axis {axis} does not exist in a weight of {num_dims} axes")
    return axis if axis < 0 else axis - num_dims


def check_cut(name: str, axis: int, start: int, length: int, block: int, size: int) -> None:
    """Refuse a cut of `size` elements that splits a block of `block` elements."""
    end = start + length
    if start < 0 or length < 0 or end > size or start % block or (end % block and end != size):
        raise WeightFormatError(
            f"{name}: cannot cut [{start}, {end}) out of {size} along axis {axis}: "
            f"cuts must fall on multiples of {block}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """Canonical experts of one layer on one rank.

    w13: [E, 2I, H] rows [gate; up], not interleaved. w2: [E, H, I]. Biases [E, 2I] and [E, H]: both or neither.
    `layer_input_scales`: the largest static activation scales (w13, w2) over all experts of the layer on all ranks.
    Kernels with one scale for all experts need it under expert parallelism, so that every rank uses the same.
    """

    w13: Weight
    w2: Weight
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    layer_input_scales: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.w13.format_name != self.w2.format_name:
            raise WeightFormatError(f"w13 is {self.w13.format_name} but w2 is {self.w2.format_name}")
        num_experts, num_rows, hidden_size = self.w13.shape
        expected = (num_experts, hidden_size, num_rows // 2)
        if num_rows % 2 or self.w2.shape != expected:
            raise WeightFormatError(f"w13 is {self.w13.shape}, so w2 must be {expected}, got {self.w2.shape}")
        if (self.b13 is None) != (self.b2 is None):
            raise WeightFormatError("expert biases come in pairs: give both b13 and b2, or neither")
        if self.b13 is not None and self.b2 is not None:
            if tuple(self.b13.shape) != (num_experts, num_rows):
                raise WeightFormatError(f"b13 must be {(num_experts, num_rows)}, got {tuple(self.b13.shape)}")
            if tuple(self.b2.shape) != (num_experts, hidden_size):
                raise WeightFormatError(f"b2 must be {(num_experts, hidden_size)}, got {tuple(self.b2.shape)}")

    @property
    def format_name(self) -> str:
        """Number format of both matrices."""
        return self.w13.format_name

    @property
    def num_experts(self) -> int:
        """E on this rank."""
        return self.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.w13.shape[2]

    @property
    def intermediate_size(self) -> int:
        """I on this rank."""
        return self.w2.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of weights, scales and biases."""
        biases = [b for b in (self.b13, self.b2) if b is not None]
        return self.w13.nbytes + self.w2.nbytes + sum(b.nbytes for b in biases)
