"""The processed layout: bit patterns, row order, padding, scale folding; all in plain torch."""

from typing import Any

import pytest
import torch

from moe.errors import WeightFormatError
from moe.formats import Bf16Weight, Fp8BlockWeight, Mxfp4Weight, Nvfp4Weight
from moe.kernels import layout
from tests.moe.kernels.packed import split_blocks
from tests.tables import rows


def bits_as_bf16(bits: torch.Tensor) -> torch.Tensor:
    return (bits << 16).view(torch.float32).bfloat16()


def unpack_e2m1(words: torch.Tensor) -> torch.Tensor:
    """The kernel's instructions, one by one, on int32."""
    h = words.int()
    bits = (h & 0x81C0, h << 3 & 0x81C0, (h & 0x2007) * 68 & 0x81C0, h >> 3 & 0x01C0 | h << 1 & 0x8000)
    return torch.stack([bits_as_bf16(b) for b in bits], dim=-2).double() * 2.0**126


def dense_columns(values_SBRK: torch.Tensor, tail_NK: torch.Tensor | None, num_cols: int) -> torch.Tensor:
    """[S, B, 64, step] and the tail [N, 64] to [N, K] as kernels add them up: the last one covers the last columns."""
    dense = torch.zeros(values_SBRK[0].flatten(0, 1).shape[0], max(num_cols, 128), dtype=values_SBRK.dtype)
    for index, values_BRK in enumerate(values_SBRK):
        first = max(0, min(index * 128, num_cols - 128))
        dense[:, first : first + 128] += values_BRK.flatten(0, 1)
    if tail_NK is not None:
        dense[:, -64:] += tail_NK
    assert not dense[:, num_cols:].any()
    return dense[:, :num_cols]


def test_every_word_unpacks_to_the_codes_it_was_packed_from() -> None:
    codes = torch.cartesian_prod(*[torch.arange(16)] * 4).int().T.contiguous()  # [4, 65536]: all words there are
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    want = torch.cat((magnitude, -magnitude))[codes.long()]
    words = layout.pack_e2m1(codes)
    assert words.unique().numel() == 65536
    assert torch.equal(unpack_e2m1(words), want)


def test_gate_and_up_alternate_in_eights_and_padding_is_marked() -> None:
    index = layout.interleave_index(2 * 40)
    assert index[:16].tolist() == [*range(8), *range(40, 48)]
    assert index.numel() == 128
    assert sorted(index[index >= 0].tolist()) == list(range(80))
    assert layout.plain_index(70).tolist() == [*range(70), *[-1] * 58]


def fields_of(data: torch.Tensor) -> torch.Tensor:
    """The scale bytes [..., 64, 4] of MXFP4 blocks."""
    return split_blocks(data)[1].contiguous().view(torch.uint8).unflatten(-1, (-1, 4))


def values_of(data: torch.Tensor) -> torch.Tensor:
    """MXFP4 blocks [..., 64 * W + 128] to the numbers [..., 64, 4 * W] that a kernel multiplies."""
    scales = torch.exp2(fields_of(data)[..., None].double() - 127)
    return (unpack_e2m1(split_blocks(data)[0]).mul(2.0**-126) * scales).flatten(-2)


@rows(
    "spread, num_cols, num_steps, ends_in_tail",
    (1, 64, 1, False), (1, 96, 1, False), (100, 96, 1, False), (100, 128, 1, False), (5, 160, 1, True),
    (100, 192, 1, True), (5, 224, 2, False), (5, 256, 2, False), (5, 288, 2, True), (5, 320, 2, True),
    (5, 352, 3, False),
)  # fmt: skip
def test_mxfp4_data_scale_and_post_multiply_to_the_weight(
    spread: int, num_cols: int, num_steps: int, ends_in_tail: bool
) -> None:
    g = torch.Generator().manual_seed(spread)
    codes = torch.randint(0, 256, (2, 70, num_cols // 2), generator=g, dtype=torch.uint8)
    scales = torch.randint(110, 110 + spread, (2, 70, num_cols // 32), generator=g, dtype=torch.uint8)
    weight = Mxfp4Weight(codes, scales)
    packed = layout.pack_matrix(weight, None, is_gated=False)
    assert packed.data.shape == (2, num_steps, 2, 64 * 32 + 128)
    assert packed.data.is_contiguous()
    assert packed.scales is None
    assert packed.nbytes == 2 * (num_steps + ends_in_tail / 2) * 2 * 64 * (64 + 4) + ends_in_tail * 512 + 16
    assert (packed.tail is not None) == layout.has_tail("mxfp4", num_cols) == ends_in_tail
    tails = [None, None]
    if packed.tail is not None:
        assert packed.tail.shape == (2, 2, 64 * 16 + 128)
        assert packed.tail.is_contiguous()
        tails = values_of(packed.tail).flatten(1, 2) * packed.post[0, 0].double()
    values = values_of(packed.data) * packed.post[0, 0].double()
    for expert in range(2):
        dense = dense_columns(values[expert], tails[expert], num_cols)
        assert torch.equal(dense[:70], weight.dequantize(torch.float64)[expert])
        assert not dense[70:].any()


@rows("num_cols, want", (160, [0, 0, 254, 254]), (224, [0, 254, 254, 254]), (288, [0, 0, 254, 254]))
def test_weights_that_other_steps_have_are_zeros_with_a_scale_that_is_a_number(num_cols: int, want: list[int]) -> None:
    """Where the steps before have scales that are no numbers, too."""
    scales = torch.full((1, 64, num_cols // 32), 255, dtype=torch.uint8)
    scales[..., num_cols // 128 * 4 :] = 100
    codes = torch.full((1, 64, num_cols // 2), 0x77, dtype=torch.uint8)
    packed = layout.pack_matrix(Mxfp4Weight(codes, scales), None, is_gated=False)
    last = packed.data[:, -1] if packed.tail is None else packed.tail
    values = values_of(last)
    num_of_others = (128 if packed.tail is None else 64) - num_cols % 128
    assert not values[..., :num_of_others].any()
    assert values[..., num_of_others:].all()
    assert (fields_of(last) == torch.tensor(want)).all()


@rows(
    "num_cols, want",
    (64, [254, 255, 0, 0]), (160, [0, 0, 255, 255]), (192, [254, 254, 255, 255]), (224, [0, 254, 254, 255]),
)  # fmt: skip
def test_a_scale_that_is_no_number_stays_one(num_cols: int, want: list[int]) -> None:
    """A tail has each scale twice."""
    scales = torch.full((1, 64, num_cols // 32), 100, dtype=torch.uint8)
    scales[0, 5, -1] = 255
    codes = torch.zeros(1, 64, num_cols // 2, dtype=torch.uint8)
    packed = layout.pack_matrix(Mxfp4Weight(codes, scales), None, is_gated=False)
    blocks = packed.data if packed.tail is None else packed.tail
    assert fields_of(blocks).view(-1, 64, 4)[-1, 5].tolist() == want


@rows("kind", Mxfp4Weight, Nvfp4Weight, Bf16Weight, Fp8BlockWeight)
def test_only_mxfp4_has_tails_and_interleaves_their_rows_too(kind: Any) -> None:
    weight = kind.quantize(torch.randn(2, 96, 160, generator=torch.Generator().manual_seed(1)))
    packed = layout.pack_matrix(weight, None, is_gated=True)
    assert (packed.tail is not None) == (kind is Mxfp4Weight)
    if packed.tail is not None:
        rows = values_of(packed.tail).flatten(1, 2)[..., 32:] * packed.post[0, 0].double()
        index = layout.interleave_index(96)
        assert torch.equal(rows[:, index >= 0], weight.dequantize(torch.float64)[:, index[index >= 0], 128:])
        assert not rows[:, index < 0].any()


def test_every_positive_e4m3_scale_is_exact_in_its_new_byte() -> None:
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    bits = (layout.pack_fraction_scales(scales).int() << 4) + (layout.FRACTION_SCALE_FIELD << 7)
    assert torch.equal(bits_as_bf16(bits).double(), scales.double() * 2.0**117)


def test_codes_of_a_zero_scale_become_zeros() -> None:
    weight = Nvfp4Weight.quantize(torch.randn(1, 64, 32))
    scales = weight.scales.clone()
    scales[0, 3, 1] = 0.0
    packed = layout.pack_matrix(Nvfp4Weight(weight.codes, scales, weight.scale_2), None, is_gated=False)
    values = unpack_e2m1(split_blocks(packed.data)[0])[0, 0, 0, 3]
    assert values[:2].any(dim=1).tolist() == [True, False]


def test_nvfp4_halves_keep_their_own_scale() -> None:
    weight = Nvfp4Weight.quantize(torch.randn(1, 64, 32))
    weight = Nvfp4Weight(weight.codes, weight.scales, torch.tensor([[0.5, 2.0]]))
    assert layout.pack_matrix(weight, None, is_gated=True).post.tolist() == [[256.0, 1024.0]]


def test_fp8_scales_follow_their_rows_through_the_interleaving() -> None:
    scale_inv = torch.arange(4.0).view(1, 4, 1) + 1
    weight = Fp8BlockWeight(torch.zeros(1, 512, 100).to(torch.float8_e4m3fn), scale_inv)
    scales = layout.pack_matrix(weight, None, is_gated=True).scales
    assert scales[0, 0, 0].tolist() == [1, 3, 1, 3, 1, 3, 1, 3]
    assert scales[0, 0, 7].tolist() == [2, 4, 2, 4, 2, 4, 2, 4]


def test_bias_is_interleaved_like_its_rows() -> None:
    bias = torch.arange(32.0)[None]
    packed = layout.pack_matrix(Bf16Weight(torch.zeros(1, 32, 8)), bias, is_gated=True)
    assert packed.bias[0, :24].tolist() == [*range(8), *range(16, 24), *range(8, 16)]
    assert not packed.bias[0, 32:].any()


def test_fp8_refuses_pairs_that_would_straddle_blocks() -> None:
    weight = Fp8BlockWeight.quantize(torch.randn(1, 24, 32))
    with pytest.raises(WeightFormatError, match="that 8 divides, got 12"):
        layout.pack_matrix(weight, None, is_gated=True)
