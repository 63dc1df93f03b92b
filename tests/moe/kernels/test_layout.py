"""The processed layout: bit patterns, row order, padding, scale folding; all in plain torch."""

import pytest
import torch

from moe.errors import WeightFormatError
from moe.formats import Bf16Weight, Fp8BlockWeight, Mxfp4Weight, Nvfp4Weight
from moe.kernels.layout import (
    FRACTION_SCALE_FIELD,
    interleave_index,
    pack_e2m1,
    pack_fraction_scales,
    pack_matrix,
    plain_index,
)
from tests.moe.kernels.packed import split_blocks


def bits_as_bf16(bits: torch.Tensor) -> torch.Tensor:
    return (
        (bits & 0xFFFF).to(torch.int32).sub(0x10000 * (bits & 0x8000 != 0).int()).to(torch.int16).view(torch.bfloat16)
    )


def unpack_e2m1(words: torch.Tensor) -> torch.Tensor:
    """The kernel's instructions, one by one, on int32."""
    h = words.int()
    bits = (h & 0x81C0, h << 3 & 0x81C0, (h & 0x2007) * 68 & 0x81C0, h >> 3 & 0x01C0 | h << 1 & 0x8000)
    return torch.stack([bits_as_bf16(b) for b in bits], dim=-2).double() * 2.0**126


def dense_rows(values_SBRK: torch.Tensor) -> torch.Tensor:
    """[S, B, 64, step] values back to [N, S, step]."""
    return values_SBRK.permute(1, 2, 0, 3).flatten(0, 1)


def dense_columns(values_NSK: torch.Tensor, num_cols: int) -> torch.Tensor:
    """[N, S, step] to [N, K] as the kernels add steps up: the last one covers the last columns."""
    dense = torch.zeros(values_NSK.shape[0], max(num_cols, 128), dtype=values_NSK.dtype)
    for index in range(values_NSK.shape[1]):
        first = max(0, min(index * 128, num_cols - 128))
        dense[:, first : first + 128] += values_NSK[:, index]
    assert not dense[:, num_cols:].any()
    return dense[:, :num_cols]


def test_every_word_unpacks_to_the_codes_it_was_packed_from() -> None:
    codes = torch.cartesian_prod(*[torch.arange(16)] * 4).int().T.contiguous()  # [4, 65536]: all words there are
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    want = torch.cat((magnitude, -magnitude))[codes.long()]
    words = pack_e2m1(codes)
    assert words.unique().numel() == 65536
    assert torch.equal(unpack_e2m1(words), want)


def test_gate_and_up_alternate_in_eights_and_padding_is_marked() -> None:
    index = interleave_index(2 * 40)
    assert index[:16].tolist() == [*range(8), *range(40, 48)]
    assert index.numel() == 128
    assert sorted(index[index >= 0].tolist()) == list(range(80))
    assert plain_index(70).tolist() == [*range(70), *[-1] * 58]


@pytest.mark.parametrize(("spread", "num_cols"), [(1, 96), (100, 96), (100, 128), (5, 288)])
def test_mxfp4_data_scale_and_post_multiply_to_the_weight(spread: int, num_cols: int) -> None:
    g = torch.Generator().manual_seed(spread)
    codes = torch.randint(0, 256, (2, 70, num_cols // 2), generator=g, dtype=torch.uint8)
    scales = torch.randint(110, 110 + spread, (2, 70, num_cols // 32), generator=g, dtype=torch.uint8)
    weight = Mxfp4Weight(codes, scales)
    packed = pack_matrix(weight, None, is_gated=False)
    words, scale_bytes = split_blocks(packed.data)
    assert words.shape == (2, -(-num_cols // 128), 2, 64, 32)
    assert packed.data.is_contiguous()
    assert packed.scales is None
    fields = scale_bytes.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))[..., None].double()
    values = unpack_e2m1(words).mul(2.0**-126) * torch.exp2(fields - 127)
    values = values.flatten(-2) * packed.post[0, 0].double()
    for expert in range(2):
        dense = dense_columns(dense_rows(values[expert]), num_cols)
        assert torch.equal(dense[:70], weight.dequantize(torch.float64)[expert])
        assert not dense[70:].any()


def test_every_positive_e4m3_scale_is_exact_in_its_new_byte() -> None:
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    bits = (pack_fraction_scales(scales).int() << 4) + (FRACTION_SCALE_FIELD << 7)
    assert torch.equal(bits_as_bf16(bits).double(), scales.double() * 2.0**117)


def test_codes_of_a_zero_scale_become_zeros() -> None:
    weight = Nvfp4Weight.quantize(torch.randn(1, 64, 32))
    scales = weight.scales.clone()
    scales[0, 3, 1] = 0.0
    packed = pack_matrix(Nvfp4Weight(weight.codes, scales, weight.scale_2), None, is_gated=False)
    values = unpack_e2m1(split_blocks(packed.data)[0])[0, 0, 0, 3]
    assert values[0].any()
    assert not values[1].any()


def test_nvfp4_halves_keep_their_own_scale() -> None:
    weight = Nvfp4Weight.quantize(torch.randn(1, 64, 32))
    weight = Nvfp4Weight(weight.codes, weight.scales, torch.tensor([[0.5, 2.0]]))
    assert pack_matrix(weight, None, is_gated=True).post.tolist() == [[256.0, 1024.0]]


def test_fp8_scales_follow_their_rows_through_the_interleaving() -> None:
    scale_inv = torch.arange(4.0).view(1, 4, 1) + 1
    weight = Fp8BlockWeight(torch.zeros(1, 512, 100).to(torch.float8_e4m3fn), scale_inv)
    scales = pack_matrix(weight, None, is_gated=True).scales
    assert scales is not None
    assert scales[0, 0, 0].tolist() == [1, 3, 1, 3, 1, 3, 1, 3]
    assert scales[0, 0, 7].tolist() == [2, 4, 2, 4, 2, 4, 2, 4]


def test_bias_is_interleaved_like_its_rows() -> None:
    bias = torch.arange(32.0)[None]
    packed = pack_matrix(Bf16Weight(torch.zeros(1, 32, 8)), bias, is_gated=True)
    assert packed.bias is not None
    assert packed.bias[0, :24].tolist() == [*range(8), *range(16, 24), *range(8, 16)]
    assert not packed.bias[0, 32:].any()


def test_fp8_refuses_pairs_that_would_straddle_blocks() -> None:
    weight = Fp8BlockWeight.quantize(torch.randn(1, 24, 32))
    with pytest.raises(WeightFormatError, match="that 8 divides, got 12"):
        pack_matrix(weight, None, is_gated=True)
