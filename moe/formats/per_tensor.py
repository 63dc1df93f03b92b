"""Scales with one number per matrix, or per half of a stacked [gate; up] matrix. Used by fp8_tensor and nvfp4."""

import torch

from moe.errors import WeightFormatError


def check_scale(name: str, scale: torch.Tensor | None, matrix_shape: tuple[int, ...]) -> None:
    """A per-tensor scale is fp32, shaped like the leading axes, with a last axis of 2 if it is given per half."""
    if scale is None:
        return
    lead = matrix_shape[:-2]
    if scale.dtype != torch.float32:
        raise WeightFormatError(f"{name} must be torch.float32, got {scale.dtype}")
    if tuple(scale.shape) not in (lead, (*lead, 2)):
        raise WeightFormatError(f"{name} must be {lead} or, per half, {(*lead, 2)}, got {tuple(scale.shape)}")
    if tuple(scale.shape) != lead and matrix_shape[-2] % 2:
        raise WeightFormatError(f"{name} is given per half, but {matrix_shape[-2]} rows have no halves")


def spread_rows(scale: torch.Tensor, matrix_shape: tuple[int, ...]) -> torch.Tensor:
    """The scale as a factor of [..., N, K]."""
    if scale.ndim == len(matrix_shape) - 2:
        return scale[..., None, None]
    return scale.repeat_interleave(matrix_shape[-2] // 2, -1)[..., None]


def narrow_rows(name: str, scale: torch.Tensor, matrix_shape: tuple[int, ...], start: int, length: int) -> torch.Tensor:
    """The scale of a range of rows; a range over both halves must keep them equally long."""
    if scale.ndim == len(matrix_shape) - 2:
        return scale
    num_rows, end = matrix_shape[-2], start + length
    if end <= num_rows // 2:
        return scale[..., 0]
    if start >= num_rows // 2:
        return scale[..., 1]
    if start + end != num_rows:
        raise WeightFormatError(f"{name} is given per half: rows [{start}, {end}) of {num_rows} split it unevenly")
    return scale
