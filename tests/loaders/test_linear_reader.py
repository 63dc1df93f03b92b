"""One linear layer of every format, exactly; and every way in which its tensors can fail to fit together."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loaders.errors import CheckpointError
from loaders.quant import COLUMNS, ROWS, inspect_linear, read_linear
from loaders.scales import e8m0_scales
from loaders.source import TensorMeta
from tests.loaders.expert_files import FORMATS, Tensors, linear_tensors, random_bf16, save
from tests.tables import rows


@rows("kind", *FORMATS)
@rows("shape", (64, 96), (192, 160), (576, 256))
def test_every_format_is_detected_and_read_exactly(tmp_path: Path, kind: str, shape: tuple[int, int]) -> None:
    tensors, dense = linear_tensors("l.0", random_bf16(*shape), kind)
    source = save(tmp_path, tensors)
    weight = read_linear(source, "l.0")
    assert weight.format_name == kind
    assert weight.shape == shape
    assert torch.equal(weight.dequantize(), dense)
    source.finish()


def test_a_bias_does_not_count_as_read_with_its_weight(tmp_path: Path) -> None:
    """Section G: a family without biases dropped one silently, because reading the weight marked its bias as read."""
    source = save(tmp_path, {"l.weight": random_bf16(2, 3), "l.bias": random_bf16(2)})
    read_linear(source, "l")
    with pytest.raises(CheckpointError, match=r"1 tensors belong to no part of the model: .*'l\.bias'"):
        source.finish()


@rows("shape", (576, 384), (128, 128), (130, 257), (1, 1))
def test_fp8_blocks_with_ragged_edges_against_a_loop(tmp_path: Path, shape: tuple[int, int]) -> None:
    """B29: the block is 128 x 128 whatever rows divided by scale rows gives."""
    rows, cols = shape
    data = (random_bf16(rows, cols) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // 128), -(-cols // 128), generator=torch.Generator().manual_seed(1))
    weight = read_linear(save(tmp_path, {"l.weight": data, "l.weight_scale_inv": scale}), "l")
    expected = data.float()
    for i in range(0, rows, 128):
        for j in range(0, cols, 128):
            expected[i : i + 128, j : j + 128] *= scale[i // 128, j // 128]
    assert torch.equal(weight.dequantize(), expected)


@rows("axis", ROWS, COLUMNS)
@rows(
    "span, blocks",
    (range(0, 128), range(0, 128)), (range(127, 128), range(0, 128)), (range(128, 129), range(128, 256)),
    (range(100, 130), range(0, 256)), (range(64, 300), range(0, 300)), (range(260, 270), range(256, 300)),
)  # fmt: skip
def test_a_part_inside_fp8_blocks_is_read_with_the_whole_of_them(
    tmp_path: Path, span: range, blocks: range, axis: int
) -> None:
    """Of 300 rows or columns; the last block has 44."""
    tensors, dense = linear_tensors("l", random_bf16(300, 300), "fp8_block")
    part = read_linear(save(tmp_path, tensors), "l", axis, span)
    assert torch.equal(part.dequantize(), dense.narrow(axis, blocks.start, len(blocks)))


def test_block_scales_in_e8m0_under_the_name_scale(tmp_path: Path) -> None:
    data = random_bf16(256, 128).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.25], [8.0]]).to(torch.float8_e8m0fnu)
    weight = read_linear(save(tmp_path, {"l.weight": data, "l.scale": scale}), "l")
    assert weight.format_name == "fp8_block"
    assert torch.equal(weight.dequantize()[128:], data.float()[128:] * 8)


@rows("dtype", torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
def test_block_scales_are_widened_to_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    """Section G: uploads with bf16 block scales load, and their products are not rounded to bf16."""
    data = random_bf16(256, 128).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.25], [8.0]] if dtype == torch.float8_e8m0fnu else [[0.28125], [7.0625]]).to(dtype)
    weight = read_linear(save(tmp_path, {"l.weight": data, "l.weight_scale_inv": scale}), "l")
    assert weight.scale_inv.dtype == torch.float32  # type: ignore[attr-defined]
    assert torch.equal(weight.dequantize(), data.float() * scale.float().repeat_interleave(128, dim=0))


@rows("kind", "fp8_tensor", "nvfp4")
def test_scales_per_tensor_are_widened_to_fp32(tmp_path: Path, kind: str) -> None:
    """Section G, its relatives: the scalar scales, in bf16."""
    tensors, _ = linear_tensors("l", random_bf16(4, 32), kind)
    name = "weight_scale" if kind == "fp8_tensor" else "weight_scale_2"
    tensors |= {f"l.{name}": torch.tensor(0.28125).bfloat16(), "l.input_scale": torch.tensor(0.5).bfloat16()}
    weight = read_linear(save(tmp_path, tensors), "l")
    scale = weight.scale if kind == "fp8_tensor" else weight.scale_2  # type: ignore[attr-defined]
    assert (scale.dtype, scale.item()) == (torch.float32, 0.28125)
    assert weight.input_scale.dtype == torch.float32  # type: ignore[attr-defined]


@rows("dtype", torch.float32, torch.uint8, torch.float8_e8m0fnu)
@rows("suffix", "scale", "weight_scale", "weight_scale_inv")
def test_mxfp4_scales_in_three_dtypes_under_three_names(tmp_path: Path, dtype: torch.dtype, suffix: str) -> None:
    exponents = torch.tensor([[118, 127], [0, 254]], dtype=torch.uint8)
    powers = torch.ldexp(torch.ones(2, 2), exponents.int() - 127)
    scale = {
        torch.float32: powers,
        torch.uint8: exponents,
        torch.float8_e8m0fnu: exponents.view(torch.float8_e8m0fnu),
    }[dtype]
    codes = torch.arange(64, dtype=torch.int8).reshape(2, 32) - 100
    weight = read_linear(save(tmp_path, {"l.weight": codes, f"l.{suffix}": scale}), "l")
    assert weight.format_name == "mxfp4"
    assert torch.equal(weight.scales, exponents)  # type: ignore[attr-defined]
    assert torch.equal(weight.codes, codes.view(torch.uint8))  # type: ignore[attr-defined]


@given(st.integers(0, 254))
@settings(max_examples=50, deadline=None)
def test_powers_of_two_become_their_exponent_byte(byte: int) -> None:
    power = torch.ldexp(torch.ones(1), torch.tensor([byte - 127]))
    assert e8m0_scales(power, TensorMeta("scale", torch.float32, (1,), "here")).tolist() == [byte]


@rows("value", 3.0, 0.0, -2.0, float("inf"), float("nan"), 2.0**-128)
def test_other_fp32_scales_of_mxfp4_are_refused(tmp_path: Path, value: float) -> None:
    scale = torch.ones(2, 1)
    scale[1, 0] = value
    source = save(tmp_path, {"l.weight": torch.zeros(2, 16, dtype=torch.int8), "l.scale": scale})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'l\.scale': MXFP4 scales must be powers of"):
        read_linear(source, "l")


@rows("shape", (), (1,))
def test_nvfp4_scalars_come_in_two_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors, dense = linear_tensors("l", random_bf16(4, 32), "nvfp4")
    for name in ("l.weight_scale_2", "l.input_scale"):
        tensors[name] = tensors[name].reshape(shape)
    weight = read_linear(save(tmp_path, tensors), "l")
    assert torch.equal(weight.dequantize(), dense)
    assert weight.input_scale.item() == 0.5  # type: ignore[attr-defined]


def fp8(rows: int = 128, cols: int = 128) -> torch.Tensor:
    return torch.ones(rows, cols).to(torch.float8_e4m3fn)


CODES = torch.zeros(2, 16, dtype=torch.uint8)
NV_SCALE = torch.ones(2, 2).to(torch.float8_e4m3fn)
ONE = torch.tensor(1.0)
REFUSALS: list[tuple[Tensors, str]] = [
    ({"l.weight": fp8()}, r"'l\.weight': float8_e4m3fn without a scale; expected one of 'l\.weight_scale_inv'"),
    ({"l.weight": CODES}, r"'l\.weight': uint8 without a scale"),
    ({"l.weight_scale_inv": ONE}, r"'l\.weight_scale_inv': a scale without its weight 'l\.weight'"),
    ({"l.input_scale": ONE}, r"'l\.input_scale': a scale without its weight"),
    ({"other": ONE}, r"tensor 'l\.weight' is missing"),
    ({"l.weight": random_bf16(2, 2), "l.weight_scale": ONE}, r"'l\.weight_scale': a scale for a weight that is plain"),
    (
        {"l.weight": fp8(), "l.weight_scale_inv": torch.ones(1, 1), "l.weight_scale": ONE},
        r"two scales, 'l\.weight_scale_inv' and 'l\.weight_scale'",
    ),
    (
        {"l.weight": fp8(576, 128), "l.weight_scale_inv": torch.ones(4, 1)},
        r"'l\.weight_scale_inv': expected shape \[5, 1\], found \[4, 1\]",
    ),
    (
        {"l.weight": fp8(), "l.weight_scale_inv": torch.ones(1, 1, dtype=torch.uint8)},
        r"'l\.weight_scale_inv': expected dtype .*float32.*, found uint8",
    ),
    ({"l.weight": fp8(), "l.weight_scale": torch.ones(128, 1)}, r"'l\.weight_scale': expected one number.*\[128, 1\]"),
    ({"l.weight": fp8(), "l.weight_scale": ONE.to(torch.float64)}, "expected dtype float32 or bfloat16, found float64"),
    ({"l.weight": fp8(), "l.weight_scale": ONE, "l.input_scale": torch.ones(2)}, r"'l\.input_scale': expected one"),
    (
        {"l.weight": fp8(), "l.weight_scale_inv": torch.ones(1, 1), "l.input_scale": ONE},
        r"'l\.input_scale': does not belong to the format",
    ),
    (
        {"l.weight": fp8(), "l.weight_scale": ONE, "l.weight_scale_2": ONE},
        r"'l\.weight_scale_2': does not belong to the format",
    ),
    ({"l.weight": CODES, "l.weight_scale": NV_SCALE}, r"'l\.weight_scale': NVFP4 block scales without .*_scale_2'"),
    (
        {"l.weight": CODES, "l.weight_scale": NV_SCALE[:1], "l.weight_scale_2": ONE},
        r"'l\.weight_scale': expected shape \[2, 2\], found \[1, 2\]",
    ),
    (
        {"l.weight": CODES, "l.weight_scale": NV_SCALE, "l.weight_scale_2": torch.ones(2)},
        r"'l\.weight_scale_2': expected one number",
    ),
    (
        {"l.weight": CODES, "l.weight_scale": torch.ones(2, 2, dtype=torch.uint8)},
        r"'l\.weight_scale': expected shape \[2, 1\], found \[2, 2\]",
    ),
    (
        {"l.weight": CODES, "l.scale": torch.ones(2, 1).bfloat16()},
        r"'l\.scale': expected dtype float8_e8m0fnu or uint8 or float32, found bfloat16",
    ),
    (
        {"l.weight": CODES, "l.scale": torch.ones(2, 1, dtype=torch.uint8), "l.weight_scale_2": ONE},
        r"'l\.weight_scale_2': does not belong",
    ),
    (
        {"l.weight": CODES[:, :12].contiguous(), "l.scale": torch.ones(2, 1, dtype=torch.uint8)},
        r"'l\.weight': 24 elements a row are no multiple of 32",
    ),
    (
        {"l.weight": fp8().to(torch.float8_e5m2), "l.weight_scale": ONE},
        r"'l\.weight': expected bf16.*found float8_e5m2",
    ),
    ({"l.weight": random_bf16(4)}, r"'l\.weight': expected a matrix"),
]


@rows(
    "suffix, maker",
    ("weight_packed", "compressed-tensors"),
    ("qweight", "GPTQ or AWQ"),
    ("weight.absmax", "bitsandbytes"),
)
def test_g44_foreign_tensors_are_named_where_config_json_says_nothing(tmp_path: Path, suffix: str, maker: str) -> None:
    tensors = {f"l.{suffix}": CODES, "l.weight_scale": NV_SCALE, "l.weight_global_scale": ONE}
    with pytest.raises(CheckpointError, match=rf"tensor 'l\.{suffix}': a format of {maker}.*supported: FP8 in 128"):
        inspect_linear(save(tmp_path, tensors), "l")


@rows("tensors, words", *REFUSALS)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, tensors: Tensors, words: str) -> None:
    source = save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_linear(source, "l")
    assert str(tmp_path) in str(caught.value)


def test_inspecting_marks_nothing_as_used(tmp_path: Path) -> None:
    source = save(tmp_path, {"l.weight": random_bf16(2, 2)})
    inspect_linear(source, "l")
    with pytest.raises(CheckpointError, match="1 tensors belong to no part"):
        source.finish()
