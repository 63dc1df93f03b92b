"""Rotary positions: YaRN and plain frequencies, a table of all positions, and the rotation itself.

There is one rotation here, of neighbouring pairs (2i, 2i+1), as DeepSeek-V3 stores them. GPT-OSS rotates element i
with element i + D/2; its q and k rows are re-ordered once at load (`pair_halves`), which leaves all scores unchanged.

Two corrections must not be confused: `attention_factor` multiplies cos and sin; `softmax_factor` multiplies the softmax
scale. GPT-OSS has only the first, DeepSeek-V3 (both mscales equal) in effect only the second.

Shape letters: T tokens, P positions, D rotated dims.
"""

import math

import torch

from model.errors import UnsupportedModelError
from model.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, dim: int) -> torch.Tensor:
    """fp32 [D/2] angles per position. Computed in fp32 as the published models do: far positions depend on it.

    Raises:
        UnsupportedModelError: an odd number of rotated dims.
    """
    if dim % 2:
        raise UnsupportedModelError(f"the rotated part of a head has {dim} dims: rope needs an even number")
    inv = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.rope_type == "default":
        return inv
    low, high = yarn_range(rope, dim)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp_(0, 1)
    return inv * (1 - ramp) + inv / rope.factor * ramp


def yarn_range(rope: RopeConfig, dim: int) -> tuple[float, float]:
    """First and last pair index of the ramp between unchanged (below) and interpolated (above) frequencies."""

    def pair_with_rotations(rotations: float) -> float:
        context = rope.original_max_position_embeddings or 0
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    if not rope.original_max_position_embeddings:
        raise UnsupportedModelError("config.json: yarn needs original_max_position_embeddings")
    low, high = pair_with_rotations(rope.beta_fast), pair_with_rotations(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high if high != low else high + 0.001


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """`0.1 * mscale * ln(factor) + 1`; 1 without stretching."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_factor(rope: RopeConfig) -> float:
    """Multiplier of cos and sin."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor)


def softmax_factor(rope: RopeConfig) -> float:
    """Multiplier of the softmax scale (DeepSeek-V3's mscale, squared: once for q, once for k)."""
    if rope.rope_type != "yarn" or not rope.mscale_all_dim:
        return 1.0
    return yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2


class RotaryTable:
    """cos + i sin of every position and pair, complex64 [P, D/2], attention factor included."""

    def __init__(self, rope: RopeConfig, dim: int, num_positions: int, device: torch.device) -> None:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles_PD = positions[:, None] * inverse_frequencies(rope, dim)
        magnitude = torch.full_like(angles_PD, attention_factor(rope))
        self.table_PD = torch.polar(magnitude, angles_PD).to(device)

    def at(self, positions_T: torch.Tensor) -> torch.Tensor:
        """complex64 [T, 1, D/2], ready to multiply heads with."""
        return self.table_PD.index_select(0, positions_T)[:, None]


def rotate_(x_THD: torch.Tensor, rotation_T1D: torch.Tensor) -> None:
    """Rotate neighbouring pairs of the last axis in place; fp32 inside. `x` may be a slice with a dense last axis."""
    if x_THD.dtype == torch.float32:
        _as_complex(x_THD).mul_(rotation_T1D)
    else:
        x_THD.copy_(torch.view_as_real(_as_complex(x_THD.float()) * rotation_T1D).flatten(-2))


def _as_complex(x_THD: torch.Tensor) -> torch.Tensor:
    num_tokens, num_heads, dim = x_THD.shape
    return torch.view_as_complex(x_THD.view(num_tokens, num_heads, dim // 2, 2))


def pair_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Re-order q or k projection rows (weight [heads * D, ...] or bias) so that element i stands next to i + D/2."""
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).flatten(0, 2).contiguous()
