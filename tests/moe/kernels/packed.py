"""Takes the processed layout of FP4 weights apart again."""

import torch

SCALE_WORDS = 128  # int16, of one int32 per row


def split_blocks(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of [..., 64 * W + 128] int16: words [..., 64, W] and scale bytes, as int32 [..., 64]."""
    words, scales = data[..., :-SCALE_WORDS], data.view(torch.int32)[..., -SCALE_WORDS // 2 :]
    return words.unflatten(-1, (64, -1)), scales
