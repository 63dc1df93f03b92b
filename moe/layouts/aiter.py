"""aiter's layout of weights and scales, in plain torch, without the library.

Shape letters: E local experts, N rows, K columns, M scale rows, C scale columns.
"""

import torch

ROWS, COLUMNS = 16, 32  # a tile of the shuffle, in elements of a one-byte type
PIECE_BYTES = 16  # bytes that one lane loads at once


def shuffle_weight(weight_ENK: torch.Tensor) -> torch.Tensor:
    """[E, N, K] in tiles of 16 rows by 32 elements; the 16-byte pieces of a tile are stored column by column.

    For one-byte types, byte (n, b) goes to (n//16)*16*K + (b//32)*512 + (b%32//16)*256 + (n%16)*16 + b%16 of its
    matrix. N must be a multiple of 16, K of 32. The kernels look for the attribute `is_shuffled`.
    """
    piece = PIECE_BYTES // weight_ENK.element_size()
    num_experts, num_rows, num_cols = weight_ENK.shape
    tiles = weight_ENK.view(num_experts, num_rows // ROWS, ROWS, num_cols // COLUMNS, COLUMNS // piece, piece)
    return mark_shuffled(tiles.permute(0, 1, 3, 4, 2, 5).reshape(weight_ENK.shape))


def mark_shuffled(weight: torch.Tensor) -> torch.Tensor:
    """Set `is_shuffled`, which views and copies lose."""
    weight.is_shuffled = True  # type: ignore[attr-defined]
    return weight


def shuffle_e8m0(scales_MC: torch.Tensor) -> torch.Tensor:
    """u8 [M, C] padded with zeros to multiples of (256, 8); element (m, c) goes to
    ((m//32)*(C/8) + c//8)*256 + (c%4)*64 + (m%16)*4 + (c%8//4)*2 + m%32//16.
    """
    num_rows, num_cols = scales_MC.shape
    rows, cols = -(-num_rows // 256) * 256, -(-num_cols // 8) * 8
    padded = torch.nn.functional.pad(scales_MC, (0, cols - num_cols, 0, rows - num_rows))
    blocks = padded.view(rows // 32, 2, 16, cols // 8, 2, 4)
    return blocks.permute(0, 3, 5, 2, 4, 1).reshape(rows, cols)
