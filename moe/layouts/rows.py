"""Tensor layouts that several kernel families share: order of halves, padding, scale swizzle. Needs no library.

Shape letters: E experts (or any leading group), I intermediate, M rows, S scale groups along K, C columns.
Canonical w13 rows are [gate; up]; FlashInfer's kernels need [up; gate] (see each function).
"""

import torch

SWIZZLE_ROWS, SWIZZLE_COLS = 128, 4  # one block of the scale layout of the tensor-core instructions


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= `size`."""
    return (size + multiple - 1) // multiple * multiple


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is >= `count`; 1 for 0."""
    return 1 << max(count - 1, 0).bit_length()


def up_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Copy of [E, 2I, ...] with rows [up; gate] instead of [gate; up]."""
    gate, up = gate_up.chunk(2, dim=1)
    return torch.cat((up, gate), dim=1)


def up_gate_padded(gate_up_E2IC: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """[E, 2I, C] rows [gate; up] to zero-padded [E, 2*rows, cols] rows [up; gate].

    Each half is padded separately, because the kernel splits in the middle:
    up at [0, I), zeros to `rows`, gate at [rows, rows + I), zeros to the end.
    """
    num_experts, num_rows, num_cols = gate_up_E2IC.shape
    half = num_rows // 2
    out = gate_up_E2IC.new_zeros((num_experts, 2 * rows, cols))
    out[:, :half, :num_cols] = gate_up_E2IC[:, half:]
    out[:, rows : rows + half, :num_cols] = gate_up_E2IC[:, :half]
    return out


def padded(tensor_EMC: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """[E, M, C] padded with zeros to [E, rows, cols]; always a copy."""
    num_experts, num_rows, num_cols = tensor_EMC.shape
    out = tensor_EMC.new_zeros((num_experts, rows, cols))
    out[:, :num_rows, :num_cols] = tensor_EMC
    return out


def interleave_halves(halves: torch.Tensor, rows: int = 64) -> torch.Tensor:
    """[E, 2I, ...] from [A; B] to A[0:rows], B[0:rows], A[rows:2*rows], ...; I must be a multiple of `rows`."""
    num_experts, num_rows = halves.shape[:2]
    chunks = halves.reshape(num_experts, 2, num_rows // 2 // rows, rows, *halves.shape[2:])
    return chunks.transpose(1, 2).reshape(halves.shape)


def swizzle_128x4(scales_EMS: torch.Tensor) -> torch.Tensor:
    """[E, M, S] one-byte scales to the 128x4 block layout, zero-padded to [E, up(M, 128), up(S, 4)].

    Element (m, s) goes to ((m//128) * (S/4) + s//4) * 512 + (m%32) * 16 + (m%128//32) * 4 + s%4 of its matrix.
    """
    num_experts, num_rows, num_cols = scales_EMS.shape
    rows, cols = round_up(num_rows, SWIZZLE_ROWS), round_up(num_cols, SWIZZLE_COLS)
    out = padded(scales_EMS.view(torch.uint8), rows, cols)
    blocks = out.view(num_experts, rows // 128, 4, 32, cols // 4, 4)
    return blocks.permute(0, 1, 4, 3, 2, 5).reshape(num_experts, rows, cols).view(scales_EMS.dtype)


def mma_view(swizzled_EMS: torch.Tensor) -> torch.Tensor:
    """Swizzled [E, M, S] seen as (32, 4, M/128, 4, S/4, E): strides only. A contiguous copy would be another layout."""
    num_experts, rows, cols = swizzled_EMS.shape
    blocks = swizzled_EMS.view(num_experts, rows // 128, cols // 4, 32, 4, 4)
    return blocks.permute(3, 4, 1, 5, 2, 0)
