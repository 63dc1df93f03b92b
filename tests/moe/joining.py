"""Puts canonical weights together: experts into a stack, gate and up into one matrix."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe.formats import Weight


def stack(weights: Sequence[Weight]) -> Weight:
    """Weights of one format and shape along a new leading axis."""
    return _join(weights, torch.stack)


def concat_rows(upper: Weight, lower: Weight) -> Weight:
    """`upper` above `lower` along N, for [gate; up]. Scales per matrix become scales per half."""
    if upper.shape[-2] % upper.row_block:
        raise ValueError(f"{upper.format_name}: the seam lies inside a block of {upper.row_block} rows")
    num_dims = len(upper.shape)
    return _join(
        (upper, lower), lambda parts: torch.cat(parts, -2) if parts[0].ndim == num_dims else torch.stack(parts, -1)
    )


def _join(weights: Sequence[Weight], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Weight:
    joined: dict[str, Any] = {}
    for field in dataclasses.fields(weights[0]):  # type: ignore[arg-type]
        parts = [getattr(weight, field.name) for weight in weights]
        joined[field.name] = None if parts[0] is None else join(parts)
    return type(weights[0])(**joined)
