"""Packs canonical expert weights into the kernels' layout, in plain torch on any device. No device code, no choices.

Every matrix [E, N, K] becomes blocks of 64 rows by one step of K, each block contiguous. The blocks of one step are
adjacent, so programs of neighbouring rows, which run at the same time, read neighbouring memory, which is faster.

    bf16   data [E, K/step, N/64, 64, words]; words are the numbers
    FP8    the same in int16 words, see `bits.py`, and scales [E, K/step, N/64, 8]: one fp32 per 8 rows
    FP4    data [E, K/step, N/64, 64 * words + 128]: int16 words of 64 rows, then one int32 of four scale bytes per row;
           where MXFP4 columns after the last whole step fill no more than half of another, tail [E, N/64, 32 * words +
           128] holds the last half step of columns the same way, and the steps end before

w13 rows are interleaved in groups of eight, [8 gate, 8 up, 8 gate, ...], which puts both halves of a gated pair into
one thread's accumulators. N is padded with zero rows. Where no whole number of steps fills K, the last step covers the
last columns, and weights that the step before has are zero in it: no kernel has to mask the activations. A K below one
step is padded with zeros at its end.
Shape letters: E experts, N rows, K reduction, B blocks of 64 rows, S steps along K, J codes in a word, W words of a row
in a step.
"""

from dataclasses import dataclass

import torch

from moe.errors import WeightFormatError
from moe.formats import Bf16Weight, Fp8BlockWeight, Mxfp4Weight, Nvfp4Weight, Weight

ROWS = 64
PAIR = 8  # rows of gate, then as many of up
STEP = {"bf16": 64, "fp8_block": 128, "mxfp4": 128, "nvfp4": 64}
WORDS = {"bf16": 64, "fp8_block": 64, "mxfp4": 32, "nvfp4": 16}  # of a row in a step
_E2M1_FACTOR_EXP = 126  # a code's bits, read as bf16, are the number times 2^-126
_TOP_FIELD = 254  # largest finite exponent field of bf16
# An NVFP4 scale s in 2^-9 .. 448 has exponents 0 .. 17 above its smallest. The kernel adds this field and so reads
# s * 2^117: with the 2^-126 of the codes that is 2^-9 of the product, far from either end of bf16.
FRACTION_SCALE_FIELD = 235
_FRACTION_SCALE_POST = 512.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMatrix:
    """One processed stack of matrices. `post` [E, 2] fp32 multiplies the sums of gate (or all) and up rows."""

    format_name: str
    num_rows: int
    num_cols: int
    data: torch.Tensor
    scales: torch.Tensor | None
    tail: torch.Tensor | None
    post: torch.Tensor
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes a kernel reads when it reads everything once."""
        parts = (self.data, self.scales, self.tail, self.post, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


def interleave_index(num_rows: int) -> torch.Tensor:
    """Source row of every row of an interleaved [gate; up] matrix; -1 for padding up to whole pairs and blocks."""
    half = num_rows // 2
    padded = _round_up(half, ROWS // 2)
    source = torch.arange(padded).masked_fill(torch.arange(padded) >= half, -1).view(-1, 1, PAIR)
    return torch.cat((source, torch.where(source >= 0, source + half, -1)), dim=1).flatten()


def plain_index(num_rows: int) -> torch.Tensor:
    """Source row of every row of a matrix padded to whole blocks; -1 for padding."""
    index = torch.arange(_round_up(num_rows, ROWS))
    return index.masked_fill(index >= num_rows, -1)


def pack_matrix(weight: Weight, bias: torch.Tensor | None, *, is_gated: bool) -> PackedMatrix:
    """Process a stack [E, N, K]; `is_gated` interleaves its two halves.

    Raises:
        WeightFormatError: there is no kernel for the number format.
    """
    if not isinstance(weight, Bf16Weight | Fp8BlockWeight | Mxfp4Weight | Nvfp4Weight):
        raise WeightFormatError(f"the triton backend has no kernel for {weight.format_name} weights")
    num_experts, num_rows, num_cols = weight.shape
    if is_gated and isinstance(weight, Fp8BlockWeight) and num_rows % (2 * PAIR):
        raise WeightFormatError(f"fp8_block experts need an intermediate size that {PAIR} divides, got {num_rows // 2}")
    index = (interleave_index if is_gated else plain_index)(num_rows).to(weight.device)
    top = _max_exponent(weight.scales) if isinstance(weight, Mxfp4Weight) else 0
    data, scales, tails = [], [], []
    for expert in range(num_experts):  # one expert at a time bounds the memory that unpacking takes
        packed, scale, tail = _pack_one(weight.select(expert), index, top)
        data.append(packed)
        scales.append(scale)
        tails.append(tail)
    return PackedMatrix(
        format_name=weight.format_name,
        num_rows=num_rows,
        num_cols=num_cols,
        data=torch.stack(data),
        scales=_stack(scales),
        tail=_stack(tails),
        post=_post(weight, top),
        bias=None if bias is None else _take_rows(bias.float().mT, index).mT.contiguous(),
    )


def packed_bytes(format_name: str, num_rows: int, num_cols: int, *, is_gated: bool, has_bias: bool) -> int:
    """`PackedMatrix.nbytes` of one matrix [N, K], without making it."""
    rows = 2 * _round_up(num_rows // 2, ROWS // 2) if is_gated else _round_up(num_rows, ROWS)
    step, with_tail = STEP[format_name], has_tail(format_name, num_cols)
    num_steps = num_cols // step if with_tail else -(-num_cols // step)
    words_of_row = WORDS[format_name] + (2 if format_name in ("mxfp4", "nvfp4") else 0)  # with the scale bytes of FP4
    num_words = rows * num_steps * words_of_row
    if with_tail:
        num_words += rows * (WORDS[format_name] // 2 + 2)
    scale_bytes = 4 * num_steps * rows // PAIR if format_name == "fp8_block" else 0
    post_bytes, bias_bytes = 2 * 4, 4 * rows if has_bias else 0
    return 2 * num_words + scale_bytes + post_bytes + bias_bytes


def _stack(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.stack(given) if given else None


def pack_e2m1(codes_J: torch.Tensor) -> torch.Tensor:
    """Codes [..., 4, W] (int32, 0..15) to int16 words [..., W] with the bit pattern that `bits.unpack_e2m1` undoes."""
    sign, value = codes_J >> 3, codes_J & 7
    word = torch.zeros_like(codes_J[..., 0, :])
    for code, (sign_bit, value_bit) in enumerate(((15, 6), (12, 3), (13, 0), (14, 9))):
        word |= sign[..., code, :] << sign_bit | value[..., code, :] << value_bit
    return word.to(torch.int16)


def pack_fraction_scales(scales: torch.Tensor) -> torch.Tensor:
    """Non-negative E4M3 numbers to bytes of 5 exponent and 3 fraction bits, subnormals made normal; zero stays 0."""
    mantissa, exponent = torch.frexp(scales)  # mantissa in [0.5, 1), exponent -8 .. 9
    fields = (exponent + 8) << 3 | (mantissa * 16 - 8).int()
    return torch.where(scales > 0, fields, 0).to(torch.uint8)


def _pack_one(
    one: Bf16Weight | Fp8BlockWeight | Mxfp4Weight | Nvfp4Weight, index: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Data, scales and tail of a matrix."""
    step = STEP[one.format_name]
    if isinstance(one, Bf16Weight):
        return _blocks(one.data.to(torch.bfloat16), index, step), None, None
    if isinstance(one, Fp8BlockWeight):
        halves = _blocks(one.data.view(torch.uint8), index, step).unflatten(-1, (2, -1))
        words = halves.mT.contiguous().flatten(-2).view(torch.int16)  # the first half's bytes are the low ones
        return words, _fp8_scales(one.scale_inv, index), None
    codes = torch.stack((one.codes & 0xF, one.codes >> 4), dim=-1).flatten(-2)
    if isinstance(one, Nvfp4Weight):  # a scale of zero has no exponent: its codes become zeros instead
        codes = codes.masked_fill((one.scales.float() == 0).repeat_interleave(16, -1), 0)
    if isinstance(one, Mxfp4Weight):
        fields = one.scales.int() - top + _TOP_FIELD  # 0 .. _TOP_FIELD, since no finite scale is above `top`
        scale_bytes = torch.where(one.scales == 255, 255, fields).to(torch.uint8)
    else:
        scale_bytes = pack_fraction_scales(one.scales.float())
    if not has_tail(one.format_name, codes.shape[1]):
        return _fp4_blocks(codes, scale_bytes, index, step), None, None
    whole = codes.shape[1] // step * step
    missing = whole + step // 2 - codes.shape[1]
    pad = torch.nn.functional.pad
    data = _fp4_blocks(codes[:, :whole], scale_bytes[:, : whole // 32], index, step)
    tail_bytes = pad(scale_bytes[:, whole // 32 :], (missing // 32, 0)).repeat_interleave(2, dim=-1)  # runs of 16
    return data, None, _fp4_blocks(pad(codes[:, whole:], (missing, 0)), tail_bytes, index, step // 2)[0]


def has_tail(format_name: str, num_cols: int) -> bool:
    """Whether the last columns are a tail, half a step wide, instead of a step."""
    step = STEP[format_name]
    return format_name == "mxfp4" and num_cols > step and 0 < num_cols % step <= step // 2


def _fp4_blocks(codes: torch.Tensor, scale_bytes: torch.Tensor, index: torch.Tensor, step: int) -> torch.Tensor:
    """Codes [N, K] and their scale bytes, one for every quarter of a step, to int16 [S, B, 16 * step + 128]."""
    words = pack_e2m1(_blocks(codes, index, step).int().unflatten(-1, (4, -1)))
    scale_words = _blocks(scale_bytes, index, 4).contiguous().view(torch.int16)
    return torch.cat((words.flatten(-2), scale_words.flatten(-2)), dim=-1)


def _post(weight: Weight, top: int) -> torch.Tensor:
    """[E, 2] fp32: what the sums of the gate (or all) and of the up rows must still be multiplied with."""
    ones = torch.ones(weight.shape[0], 2, device=weight.device)
    if isinstance(weight, Mxfp4Weight):  # `top` was stored as the largest field there is
        return ones * 2.0 ** (top + _E2M1_FACTOR_EXP - _TOP_FIELD)
    if isinstance(weight, Nvfp4Weight):
        return ones * _FRACTION_SCALE_POST * weight.scale_2.float().reshape(weight.shape[0], -1)
    return ones


def _max_exponent(scales: torch.Tensor) -> int:
    finite = scales.masked_fill(scales == 255, 0)
    return int(finite.max()) if scales.numel() else 0


def _fp8_scales(scale_inv: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[N/128, K/128] to [S, B, 8]: the scale of every eight rows, which share a block since pairs are eight wide."""
    rows_8 = index[::PAIR]
    scale = scale_inv.float()[rows_8.clamp(min=0) // 128].masked_fill(rows_8[:, None] < 0, 0.0)
    return scale.unflatten(0, (len(index) // ROWS, ROWS // PAIR)).permute(2, 0, 1).contiguous()


def _blocks(matrix_NK: torch.Tensor, index: torch.Tensor, step: int) -> torch.Tensor:
    """[N, K] to [S, B, 64, step], rows by `index`, zero where it is -1 and where the last step overlaps."""
    rows = _take_rows(matrix_NK, index)
    num_rows, num_cols = rows.shape  # either may be 0: a rank need not own any of the intermediate axis
    padded = _round_up(num_cols, step)
    missing = padded - num_cols
    blocks = torch.nn.functional.pad(rows, (0, missing)).view(num_rows // ROWS, ROWS, padded // step, step)
    if num_cols > step:
        blocks[:, :, -1] = blocks[:, :, -1].roll(missing, dims=-1)
    return blocks.permute(2, 0, 1, 3).contiguous()


def _take_rows(matrix_NK: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if matrix_NK.shape[0] == 0:
        return matrix_NK.new_zeros((index.shape[0], matrix_NK.shape[1]))
    rows = matrix_NK[index.clamp(min=0)]
    rows[index < 0] = 0
    return rows


def _round_up(size: int, block: int) -> int:
    return -(-size // block) * block
