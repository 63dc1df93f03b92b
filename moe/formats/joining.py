"""Put canonical weights together: experts into a stack, gate and up into one matrix. Tensors are copied."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe.errors import WeightFormatError
from moe.formats.base import Weight


def stack(weights: Sequence[Weight]) -> Weight:
    """Weights of one format and shape along a new leading axis."""
    return _join(weights, lambda parts, num_dims: torch.stack(parts))


def concat_rows(upper: Weight, lower: Weight) -> Weight:
    """`upper` above `lower` along N, for [gate; up]. Scales per matrix become scales per half.

    Raises:
        WeightFormatError: formats differ, or the seam would split a scale block.
    """
    if upper.shape != lower.shape:
        raise WeightFormatError(f"two halves must have one shape, got {upper.shape} and {lower.shape}")
    if upper.shape[-2] % upper.row_block:
        raise WeightFormatError(
            f"{upper.format_name}: a half of {upper.shape[-2]} rows ends inside a block of {upper.row_block} rows; "
            "dequantize it first"
        )
    num_lead = len(upper.shape) - 2

    def join(parts: list[torch.Tensor], num_dims: int) -> torch.Tensor:
        if num_dims == num_lead + 2:
            return torch.cat(parts, dim=-2)
        if num_dims > num_lead:
            raise WeightFormatError(f"{upper.format_name}: a matrix whose scales are given per half is already joined")
        return torch.stack(parts, dim=-1)

    return _join((upper, lower), join)


def _join(weights: Sequence[Weight], join: Callable[[list[torch.Tensor], int], torch.Tensor]) -> Weight:
    if not weights:
        raise WeightFormatError("there is no weight to join")
    kind = type(weights[0])
    if any(type(weight) is not kind for weight in weights):
        raise WeightFormatError(f"cannot join formats {sorted({weight.format_name for weight in weights})}")
    if any(weight.shape != weights[0].shape for weight in weights):
        raise WeightFormatError(f"cannot join shapes {sorted({weight.shape for weight in weights})}")
    joined: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        parts = [getattr(weight, field.name) for weight in weights]
        missing = sum(part is None for part in parts)
        if missing not in (0, len(parts)):
            raise WeightFormatError(f"{field.name} is missing in {missing} of {len(parts)} weights")
        joined[field.name] = None if missing else join(parts, parts[0].ndim)
    return kind(**joined)
