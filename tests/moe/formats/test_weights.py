"""Properties that every weight format shares: round trips, cuts, stacks, refusals."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.errors import WeightFormatError
from moe.formats import Bf16Weight, ExpertWeights, Fp8BlockWeight, Fp8TensorWeight, Mxfp4Weight, Nvfp4Weight, Weight
from moe.formats.fp8 import E4M3
from tests.moe.joining import concat_rows, stack
from tests.tables import rows

FORMATS = [Bf16Weight, Fp8BlockWeight, Fp8TensorWeight, Mxfp4Weight, Nvfp4Weight]
# Largest error of one element relative to the largest magnitude of its scale block: half of the widest step.
ROUND_TRIP = {"bf16": 2**-8, "fp8_block": 2**-4, "fp8_tensor": 2**-4, "mxfp4": 0.26, "nvfp4": 0.19}
every_format = pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.format_name)


def dense(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors(weight: Weight) -> list[torch.Tensor]:
    return [getattr(weight, name) for name in weight.__slots__ if getattr(weight, name) is not None]


def data_bytes(weight: Weight) -> torch.Tensor:
    return tensors(weight)[0].contiguous().view(torch.uint8)


shapes = st.tuples(st.integers(1, 3), st.integers(1, 300), st.integers(1, 9).map(lambda k: 32 * k))


@every_format
@settings(max_examples=15, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**31), exponent=st.integers(-12, 12))
def test_round_trip_error_is_bounded_and_quantizing_twice_changes_nothing(
    kind: type[Weight], shape: tuple[int, int, int], seed: int, exponent: int
) -> None:
    original = dense(*shape, seed=seed) * 2.0**exponent
    weight = kind.quantize(original)
    assert weight.shape == shape
    decoded = weight.dequantize()
    assert decoded.shape == shape
    assert decoded.dtype == torch.float32
    bound = ROUND_TRIP[kind.format_name] * original.abs().amax((-2, -1), keepdim=True)
    assert bool(((decoded - original).abs() <= bound).all())
    again = kind.quantize(decoded)
    torch.testing.assert_close(again.dequantize(), decoded, rtol=1e-6, atol=0)
    if kind is not Bf16Weight:
        assert torch.equal(data_bytes(again), data_bytes(weight))


@every_format
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_narrow_then_dequantize_is_dequantize_then_narrow(kind: type[Weight], data: st.DataObject) -> None:
    weight = kind.quantize(dense(3, 300, 288))
    axis = data.draw(st.sampled_from([0, 1, 2, -1, -2, -3]))
    size, block = weight.shape[axis], {1: kind.row_block, 2: kind.col_block}.get(axis % 3, 1)
    start = block * data.draw(st.integers(0, (size - 1) // block))
    end = data.draw(st.sampled_from([*range(start, size, block), size]))
    cut = weight.narrow(axis, start, end - start)
    assert torch.equal(cut.dequantize(), weight.dequantize().narrow(axis, start, end - start))
    assert cut.shape == tuple(cut.dequantize().shape)


@every_format
def test_select_to_dtype_and_axes_that_do_not_exist(kind: type[Weight]) -> None:
    weight = kind.quantize(dense(3, 130, 64))
    assert torch.equal(weight.select(1).dequantize(), weight.dequantize()[1])
    assert weight.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert weight.device == torch.device("cpu")
    assert weight.nbytes == sum(tensor.nbytes for tensor in tensors(weight))
    moved = weight.to(torch.device("meta"))
    assert moved.device.type == "meta"
    assert moved.shape == weight.shape
    assert isinstance(weight, Weight)
    with pytest.raises(WeightFormatError, match="axis 3"):
        weight.narrow(3, 0, 1)


@every_format
def test_gate_above_up_keeps_both_scales(kind: type[Weight]) -> None:
    gate, up = kind.quantize(dense(128, 64)), kind.quantize(100 * dense(128, 64, seed=1))
    both = concat_rows(gate, up)
    want = torch.cat([gate.dequantize(), up.dequantize()])
    assert torch.equal(both.dequantize(), want)
    for stacked in (stack([both, both]), concat_rows(stack([gate, gate]), stack([up, up]))):
        assert torch.equal(stacked.dequantize(), torch.stack([want, want]))
        for start in (0, 128):
            assert torch.equal(stacked.narrow(-2, start, 128).dequantize(), want[start : start + 128].expand(2, -1, -1))


@rows("kind", Fp8TensorWeight, Nvfp4Weight)
def test_scales_per_half_follow_a_cut_of_rows(kind: type[Weight]) -> None:
    scale = torch.tensor(0.5)
    both = concat_rows(kind.quantize(dense(8, 32), scale), kind.quantize(9 * dense(8, 32, seed=1), 2 * scale))
    assert both.input_scale.tolist() == [0.5, 1.0]
    middle = both.narrow(0, 4, 8)
    assert torch.equal(middle.dequantize(), both.dequantize()[4:12])
    assert both.narrow(0, 9, 3).input_scale.item() == 1.0
    assert both.narrow(1, 0, 16 if kind is Nvfp4Weight else 5).input_scale.tolist() == [0.5, 1.0]
    with pytest.raises(WeightFormatError, match="unevenly"):
        both.narrow(0, 4, 5)
    with pytest.raises(WeightFormatError, match="no halves"):
        kind(*tensors(kind.quantize(dense(7, 32)))[:-1], scale.repeat(2))


@rows(
    "kind, axis, start, length",
    (Mxfp4Weight, -1, 16, 32), (Mxfp4Weight, -1, 0, 48), (Nvfp4Weight, 2, 8, 16),
    (Fp8BlockWeight, -1, 64, 128), (Fp8BlockWeight, -2, 0, 100), (Fp8BlockWeight, 1, 130, 128),
    (Fp8BlockWeight, -1, 64, 64), (Fp8BlockWeight, -1, 64, 224), (Fp8BlockWeight, -2, 127, 129),
    (Fp8BlockWeight, -2, 130, 130), (Mxfp4Weight, -1, 16, 16), (Nvfp4Weight, 2, 8, 280),
    (Fp8TensorWeight, -1, 200, 100), (Bf16Weight, 0, 2, 5), (Bf16Weight, 0, -1, 1),
)  # fmt: skip
def test_cuts_in_blocks_or_past_the_end_are_refused(kind: type[Weight], axis: int, start: int, length: int) -> None:
    with pytest.raises(WeightFormatError, match="cannot cut"):
        kind.quantize(dense(3, 260, 288)).narrow(axis, start, length)


@rows("shape", (576, 7168 // 8), (128, 128), (130, 257), (1, 1), (129, 128))
def test_fp8_blocks_with_ragged_edges_agree_with_a_loop(shape: tuple[int, int]) -> None:
    num_rows, num_cols = shape
    data = dense(*shape).to(E4M3)
    scale_inv = torch.rand(-(-num_rows // 128), -(-num_cols // 128)) + 0.5
    got = Fp8BlockWeight(data, scale_inv).dequantize()
    for row, col in [*itertools.product(range(0, num_rows, 61), range(0, num_cols, 53)), (num_rows - 1, num_cols - 1)]:
        assert got[row, col] == data[row, col].float() * scale_inv[row // 128, col // 128]


@every_format
def test_blocks_of_zeros_stay_zero(kind: type[Weight]) -> None:
    assert not kind.quantize(torch.zeros(2, 130, 64)).dequantize().any()


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape).to(E4M3)


ONE = torch.tensor(1.0)


@rows(
    "kind, parts, message",
    (Fp8BlockWeight, (fp8(130, 128), torch.ones(1, 1)), r"needs scale_inv \(2, 1\)"),
    (Fp8BlockWeight, (torch.zeros(8, 8), torch.ones(1, 1)), "data must be torch.float8_e4m3fn"),
    (Fp8BlockWeight, (fp8(8, 8), torch.ones(1, 1).half()), "scale_inv must be"),
    (Fp8TensorWeight, (torch.zeros(8, 8), ONE), "data must be"),
    (Fp8TensorWeight, (fp8(8, 8), torch.ones(3)), "scale must be"),
    (Fp8TensorWeight, (fp8(8, 8), ONE, torch.tensor(1)), "input_scale must"),
    (Mxfp4Weight, (codes(8, 16), codes(8, 2)), r"need scales \(8, 1\)"),
    (Mxfp4Weight, (codes(8, 16), torch.zeros(8, 1)), "scales must be uint8"),
    (Nvfp4Weight, (codes(8, 8), torch.zeros(8, 1), ONE), "scales must be"),
    (Nvfp4Weight, (codes(8, 8), fp8(8, 2), ONE), r"need scales \(8, 1\)"),
    (Nvfp4Weight, (codes(8, 8), fp8(8, 1), torch.ones(2, 2)), "scale_2 must be"),
    (Bf16Weight, (torch.zeros(2, 2, dtype=torch.int8),), "floating dtype"),
    (Bf16Weight, (fp8(2, 2),), "floating dtype"),
)
def test_broken_weights_are_refused(kind: type[Weight], parts: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(WeightFormatError, match=message):
        kind(*parts)


def plain(*shape: int) -> Bf16Weight:
    return Bf16Weight(torch.zeros(*shape))


@rows(
    "changes, message",
    ({"w2": Mxfp4Weight.quantize(torch.zeros(2, 64, 32))}, "w13 is bf16 but w2 is mxfp4"),
    ({"w2": plain(2, 64, 33)}, "so w2 must be"),
    ({"w13": plain(2, 63, 64)}, "so w2 must be"),
    ({"b13": torch.zeros(2, 64)}, "in pairs"),
    ({"b13": torch.zeros(2, 63), "b2": torch.zeros(2, 64)}, "b13 must be"),
    ({"b13": torch.zeros(2, 64), "b2": torch.zeros(2, 63)}, "b2 must be"),
)
def test_experts_that_do_not_fit_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightFormatError, match=message):
        ExpertWeights(**({"w13": plain(2, 64, 64), "w2": plain(2, 64, 32)} | changes))


def test_expert_record_counts_sizes_and_bytes() -> None:
    experts = ExpertWeights(w13=plain(2, 64, 48), w2=plain(2, 48, 32), b13=torch.zeros(2, 64), b2=torch.zeros(2, 48))
    assert (experts.num_experts, experts.hidden_size, experts.intermediate_size) == (2, 48, 32)
    assert experts.format_name == "bf16"
    assert experts.nbytes == 4 * (2 * 64 * 48 + 2 * 48 * 32 + 2 * 64 + 2 * 48)
