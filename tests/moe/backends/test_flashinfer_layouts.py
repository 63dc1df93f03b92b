"""Golden maps of the kernel layouts: they pin the emulators, our layout functions and the installed library alike."""

import hashlib
from typing import Any

import pytest
import torch

from moe.backends.flashinfer.trtllm_layout import pack_topk
from moe.layouts import rows as ours
from moe.routing import StandardTopK
from tests.emulators import layouts, numbers
from tests.emulators.device import import_flashinfer
from tests.tables import rows

NEW_ROWS = {
    0: "040800004d280000960c0000df2c0000040849204d284920960c4920df2c4920",
    8: "04da00004dfa000096de0000dffe000004da49204dfa492096de4920dffe4920",
}


@pytest.fixture(scope="module")
def flashinfer() -> Any:
    import_flashinfer()  # takes seconds, so not while all processes of a run collect their tests
    import flashinfer.cute_dsl
    import flashinfer.fused_moe

    return flashinfer


def byte_matrix() -> torch.Tensor:
    return (torch.arange(16 * 32) & 255).to(torch.uint8).view(1, 16, 32)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def test_sm90_weight_bytes_of_the_folded_releases() -> None:
    out = layouts.sm90_interleave(byte_matrix())
    for row, text in NEW_ROWS.items():
        assert bytes(out[0, row].tolist()).hex() == text
    assert digest(out).startswith("0e30f0e8c0618797")
    assert layouts.permute_word(0x32547698) == 0xA47D8434
    assert layouts.permute_word(0x12345678) == 0x21EB8434


def test_sm90_scale_helper_of_the_installed_release(flashinfer: Any) -> None:
    fused_moe = flashinfer.fused_moe
    numbered = torch.arange(64 * 8).to(torch.int32).view(1, 64, 8)
    folded = fused_moe.interleave_moe_scales_for_sm90_mixed_gemm((numbered // 8).to(torch.uint8), group_size=32)
    assert folded.shape == (1, 1, 2, 16, 16)
    rows = folded.flatten().tolist()
    assert rows[:17] == [0] * 4 + [16] * 4 + [32] * 4 + [48] * 4 + [1]
    groups = fused_moe.interleave_moe_scales_for_sm90_mixed_gemm((numbered % 8).to(torch.uint8), group_size=32)
    assert groups.flatten().tolist()[:8] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert groups.flatten().tolist()[256:264] == [4, 5, 6, 7, 4, 5, 6, 7]
    random = torch.randint(0, 256, (3, 128, 12), dtype=torch.uint8)
    again = layouts.unfold_scales(fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(random), 128, 12)
    assert torch.equal(again, random)


@rows("shape, message", ((1, 32, 8), "divisible by 64"), ((1, 64, 6), "K/group_size=6"))
def test_sm90_scale_helper_refuses_partial_tiles(shape: tuple[int, ...], message: str, flashinfer: Any) -> None:
    with pytest.raises(ValueError, match=message):
        flashinfer.fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(torch.zeros(shape, dtype=torch.uint8))


def test_halves_are_padded_separately() -> None:
    interleaved = torch.arange(12, dtype=torch.uint8)  # checkpoint rows: gate 0, up 0, gate 1, ...
    gate_up = torch.cat((interleaved[0::2], interleaved[1::2]))[None, :, None] + 1  # 0 marks padding
    out = ours.up_gate_padded(gate_up, 8, 1).flatten().tolist()
    assert out == [2, 4, 6, 8, 10, 12, 0, 0, 1, 3, 5, 7, 9, 11, 0, 0]


def test_swizzle_positions() -> None:
    position = layouts.swizzle_position(256, 8)
    for (row, col), at in {
        (0, 3): 3, (1, 0): 16, (32, 0): 4, (33, 5): 533, (96, 3): 15, (128, 0): 1024, (200, 7): 1675,
    }.items():  # fmt: skip
        assert position[row, col] == at


@rows("rows, cols", (256, 8), (200, 7), (1, 1))
def test_our_swizzle_is_the_golden_one_and_pads_with_zeros(rows: int, cols: int) -> None:
    scales = torch.randint(1, 256, (2, rows, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    out = ours.swizzle_128x4(scales)
    assert out.shape == (2, ours.round_up(rows, 128), ours.round_up(cols, 4))
    assert torch.equal(layouts.unswizzle(out, rows, cols), scales)
    assert int((out != 0).sum()) == scales.numel()


def test_mma_view_is_strides_only(flashinfer: Any) -> None:
    scales = torch.randint(0, 256, (2, 256, 8), dtype=torch.uint8)
    swizzled = ours.swizzle_128x4(scales)
    view = ours.mma_view(swizzled)
    assert view.shape == (32, 4, 2, 4, 2, 2)
    assert view.stride() == (16, 4, 1024, 1, 512, 2048)
    assert view.data_ptr() == swizzled.data_ptr()
    assert torch.equal(layouts.unview_mma(view, 256, 8), scales)
    convert = flashinfer.cute_dsl.convert_sf_to_mma_layout
    theirs = convert(swizzled.flatten(), m=256, k=128, num_groups=2, sf_vec_size=16)
    assert theirs.shape == view.shape
    assert theirs.stride() == view.stride()
    assert torch.equal(theirs, view)


def test_cutedsl_interleave() -> None:
    rows = torch.arange(256)[None, :, None]
    out = ours.interleave_halves(rows).flatten().tolist()
    assert [out[row] for row in (63, 64, 127, 128, 192)] == [63, 128, 191, 64, 192]
    assert torch.equal(layouts.deinterleave(ours.interleave_halves(rows)), rows)


def test_trtllm_gather_is_what_the_library_does(flashinfer: Any) -> None:
    gather = layouts.shuffle_gather(256, gated=True)
    assert gather[:8].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert gather[8:16].tolist() == [128, 130, 132, 134, 136, 138, 140, 142]
    assert gather[16:18].tolist() == [1, 3]
    assert layouts.shuffle_gather(32, gated=False)[:9].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 1]
    assert layouts.shuffle_gather(16, gated=False, block=16).tolist() == [*range(0, 16, 2), *range(1, 16, 2)]
    rows = torch.arange(256, dtype=torch.float32)[:, None]
    theirs = flashinfer.shuffle_matrix_a(flashinfer.reorder_rows_for_gated_act_gemm(rows), 128)
    assert torch.equal(theirs.flatten().long(), gather)


def test_packed_routing() -> None:
    topk = StandardTopK(torch.tensor([[0.75, 0.5]]), torch.tensor([[5, -1]], dtype=torch.int32))
    packed = pack_topk(topk)
    assert packed.dtype == torch.int32
    assert packed.tolist() == [[343872, 0]]


def test_powers_of_two() -> None:
    assert [ours.next_power_of_two(count) for count in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]


def test_the_emulated_quantizer_gives_the_golden_bytes() -> None:
    block = torch.tensor([.1, -.2, .3, .4, -.5, .6, .7, -.8, .9, 1, -1.1, 1.2, .05, 0, -1.5, 3])  # fmt: skip
    codes, scales = numbers.quantize_nvfp4(block, 112.0)
    assert scales.view(torch.uint8).tolist() == [0x66]
    assert bytes(codes.tolist()).hex() == "90212ab3444c007d"
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0])
    assert numbers.fp4_values(numbers.fp4_codes(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
