"""The kernels' weight layouts, forwards where a compiled helper writes them and backwards for decoding.

Written from byte positions, element by element, so that they share no formula with the code under test.
"""

import functools

import torch

# destination bit of every source bit in one 32-bit word of the SM90 mixed GEMM, as of the folded-scale releases
_BITS = [6, 7, 8, 15, 22, 23, 24, 31, 3, 4, 5, 12, 19, 20, 21, 28]
_BITS += [0, 1, 2, 9, 16, 17, 18, 25, 13, 10, 11, 14, 29, 26, 27, 30]


def permute_word(word: int) -> int:
    """One 32-bit word with its bits moved."""
    return sum(((word >> source) & 1) << target for source, target in enumerate(_BITS))


@functools.cache
def _byte_tables(*, inverse: bool) -> torch.Tensor:
    """[4, 256] words: where the bits of each byte value at each byte position end up."""
    table = torch.zeros(4, 256, dtype=torch.int64)
    values = torch.arange(256)
    for source, target in enumerate(_BITS):
        here, there = (target, source) if inverse else (source, target)
        table[here // 8] |= ((values >> here % 8) & 1) << there
    return table


def _rewrite(octets: torch.Tensor, *, inverse: bool) -> torch.Tensor:
    """u8 [..., 4] little-endian words with their bits moved, as u8 [..., 4]."""
    table = _byte_tables(inverse=inverse)
    words = sum(table[position][octets[..., position].long()] for position in range(4))
    return ((words[..., None] >> torch.tensor([0, 8, 16, 24])) & 255).to(torch.uint8)


@functools.cache
def _sm90_positions(num_rows: int, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(source, target) flat byte positions, [words, 4] each: source bytes form a word, stored at target bytes."""
    row = torch.tensor([r for r in range(num_rows) if r % 16 < 8])[:, None, None, None]
    part, lane = torch.arange(num_bytes // 32)[:, None, None], torch.arange(16)[:, None]
    octet = torch.arange(4)
    quarter = lane // 4
    source = (row + 8 * (octet % 2)) * num_bytes + 32 * part + 8 * quarter + lane % 4 + 4 * (octet // 2)
    target = (row + 8 * (quarter % 2)) * num_bytes + 32 * part + 16 * (lane // 8) + 4 * (lane % 4) + octet
    return source.reshape(-1, 4), target.reshape(-1, 4)


def sm90_interleave(weight: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """u8 [E, rows, bytes] as the compiled SM90 helper of the folded-scale releases rewrites it; or back."""
    positions = _sm90_positions(*weight.shape[1:])
    source, target = reversed(positions) if inverse else positions
    flat = weight.flatten(1)
    out = torch.empty_like(flat)
    out[:, target] = _rewrite(flat[:, source], inverse=inverse)
    return out.view(weight.shape)


def sm90_restore(weight: torch.Tensor) -> torch.Tensor:
    """The inverse of `sm90_interleave`."""
    return sm90_interleave(weight, inverse=True)


def unfold_scales(folded: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """Folded SM90 scale bytes back to [E, rows, groups]: out[e, m, c, f, 4s+g] was in[e, 64m+16s+f, 4c+g]."""
    octets = folded.view(torch.uint8).reshape(folded.shape[0], -1)
    row, group = torch.arange(rows)[:, None], torch.arange(groups)
    position = ((row // 64 * (groups // 4) + group // 4) * 16 + row % 16) * 16 + 4 * (row % 64 // 16) + group % 4
    return octets[:, position]


def swizzle_position(rows: int, cols: int) -> torch.Tensor:
    """[rows, cols] flat positions of the 128x4 layout of a matrix padded to (128, 4)."""
    row, col = torch.arange(rows)[:, None], torch.arange(cols)
    num_col_blocks = (cols + 3) // 4
    return (row // 128 * num_col_blocks + col // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """[E, rows, cols] bytes to flat [E, padded size]; the padding is filled with a byte that decodes to NaN."""
    num_experts, rows, cols = scales.shape
    out = scales.new_full((num_experts, (rows + 127) // 128 * 128 * ((cols + 3) // 4 * 4)), 0x7F)
    out[:, swizzle_position(rows, cols).flatten()] = scales.flatten(1)
    return out


def unswizzle(flat: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Flat swizzled bytes [E, ...] back to [E, rows, cols]."""
    return flat.reshape(flat.shape[0], -1)[:, swizzle_position(rows, cols)]


def unview_mma(view: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """(32, 4, M/128, 4, K/4, E) scale view back to [E, rows, cols], by index."""
    row, col = torch.arange(rows)[:, None], torch.arange(cols)
    return view[row % 32, row % 128 // 32, row // 128, col % 4, col // 4].permute(2, 0, 1)


def shuffle_gather(num_rows: int, *, gated: bool, block: int = 32) -> torch.Tensor:
    """Source row of every stored row of a TRT-LLM matrix: up and gate alternate, then blocks of 32 are dealt by 4."""
    within = [start + step for start in range(block // 8) for step in range(0, block, block // 8)]
    shuffle = [base + index for base in range(0, num_rows, block) for index in within]
    half = num_rows // 2
    reorder = [row // 2 + half * (row % 2) for row in range(num_rows)] if gated else list(range(num_rows))
    return torch.tensor([reorder[row] for row in shuffle])


def unshuffle(rows: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """[E, M, ...] stored rows back to their order before the shuffle ([up; gate] if gated)."""
    out = torch.empty_like(rows)
    out[:, shuffle_gather(rows.shape[1], gated=gated)] = rows
    return out


def deinterleave(rows: torch.Tensor, chunk: int = 64) -> torch.Tensor:
    """[E, 2I, ...] stored as A[0:64], B[0:64], A[64:128], ... back to [A; B]."""
    half = rows.shape[1] // 2
    stored = [2 * (row // chunk) * chunk + row % chunk for row in range(half)]
    return rows[:, stored + [position + chunk for position in stored]]
