"""Field report G45: a scale that cannot be right is refused by name, in whichever layer and expert it stands."""

from pathlib import Path

import pytest
import torch

from loaders.errors import CheckpointError
from loaders.experts import read_gpt_oss_experts, read_split_experts
from loaders.quant import read_linear
from moe import RankPlace
from tests.loaders.expert_files import (
    Tensors,
    fused_experts,
    linear_tensors,
    random_bf16,
    save,
    shape_of,
    split_experts,
)
from tests.tables import rows

WRONG = (float("nan"), float("inf"), 0.0, -0.25)


def refused(folder: Path, tensors: Tensors, words: str) -> None:
    source = save(folder, tensors)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {words}"):
        read_linear(source, "l")


@rows("value", *WRONG)
@rows(
    "kind, name",
    ("nvfp4", "l.weight_scale_2"),
    ("nvfp4", "l.input_scale"),
    ("fp8_tensor", "l.weight_scale"),
    ("fp8_tensor", "l.input_scale"),
)
def test_g45_a_scale_per_tensor_must_be_finite_and_above_zero(
    tmp_path: Path, kind: str, name: str, value: float
) -> None:
    tensors, _ = linear_tensors("l", random_bf16(4, 32), kind)
    refused(tmp_path, tensors | {name: torch.tensor(value)}, rf"'{name}': a scale must be .* above 0, found {value}")


@rows("value", *WRONG)
@rows("dtype", torch.float32, torch.bfloat16)
def test_g45_one_wrong_block_scale_among_good_ones(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    tensors, _ = linear_tensors("l", random_bf16(256, 384), "fp8_block")
    tensors["l.weight_scale_inv"] = tensors["l.weight_scale_inv"].to(dtype)
    tensors["l.weight_scale_inv"][1, 2] = value
    refused(tmp_path, tensors, rf"'l\.weight_scale_inv': a scale must be .*, found {value}")


@rows("byte, shown", (0x7F, "nan"), (0xFF, "nan"), (0xB8, "-1.0"), (0x80, "-0.0"))
def test_g45_nvfp4_block_scales_are_neither_nan_nor_negative(tmp_path: Path, byte: int, shown: str) -> None:
    tensors, _ = linear_tensors("l", random_bf16(4, 32), "nvfp4")
    tensors["l.weight_scale"].view(torch.uint8)[3, 1] = byte
    refused(tmp_path, tensors, rf"'l\.weight_scale': a block scale must be 0 or above, found {shown}")


def test_a_block_of_zeros_has_the_nvfp4_scale_zero(tmp_path: Path) -> None:
    dense = random_bf16(4, 32)
    dense[2, 16:] = 0
    tensors, meant = linear_tensors("l", dense, "nvfp4")
    assert tensors["l.weight_scale"].float()[2, 1] == 0
    assert torch.equal(read_linear(save(tmp_path, tensors), "l").dequantize(), meant)


@rows("dtype", torch.uint8, torch.float8_e8m0fnu)
def test_g45_e8m0_byte_255_is_nan(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors, _ = linear_tensors("l", random_bf16(4, 64), "mxfp4")
    tensors["l.weight_scale"][1, 1] = 255
    tensors["l.weight_scale"] = tensors["l.weight_scale"].view(dtype)
    refused(tmp_path, tensors, r"'l\.weight_scale': an E8M0 scale is 255")


def test_g45_e8m0_scales_of_fp8_blocks(tmp_path: Path) -> None:
    tensors, _ = linear_tensors("l", random_bf16(128, 128), "fp8_block")
    tensors["l.weight_scale_inv"] = torch.tensor([[255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    refused(tmp_path, tensors, r"'l\.weight_scale_inv': a scale must be .*, found nan")


@rows("expert", 0, 3)
@rows("name", "down_proj.weight_scale_2", "up_proj.input_scale", "gate_proj.weight_scale")
def test_g45_any_expert_is_looked_at(tmp_path: Path, expert: int, name: str) -> None:
    """A scale per tensor is refused on every rank, a block scale on the rank that holds the expert."""
    tensors, _, _ = split_experts("nvfp4", 4, 64, 32)
    bad = f"x.{expert}.{name}"
    if name.endswith("weight_scale"):
        tensors[bad].view(torch.uint8)[0, 0] = 0x7F
        ranks = [expert // 2]
    else:
        tensors[bad] = torch.tensor(float("nan"))
        ranks = [0, 1]
    for rank in ranks:
        source = save(tmp_path, tensors)
        place = RankPlace(ep_size=2, ep_rank=rank)
        with pytest.raises(CheckpointError, match=rf"tensor '{bad}': .*found nan"):
            read_split_experts(source, "x", shape_of(4, 64, 32), place)


@rows(
    "kind, suffix",
    ("fp8_tensor", "weight_scale"),
    ("fp8_tensor", "input_scale"),
    ("fp8_block", "weight_scale_inv"),
    ("nvfp4", "weight_scale"),
    ("nvfp4", "weight_scale_2"),
    ("nvfp4", "input_scale"),
    ("mxfp4", "weight_scale"),
)
@rows("projection", "gate_proj", "up_proj", "down_proj")
def test_g45_every_scale_of_an_expert_in_every_format(tmp_path: Path, kind: str, suffix: str, projection: str) -> None:
    """NaN for all of them; the error names file and tensor."""
    tensors, _, _ = split_experts(kind, 2, 256, 128)
    bad = f"x.1.{projection}.{suffix}"
    if kind == "mxfp4":
        tensors[bad].view(-1)[-1] = 255
    elif tensors[bad].dtype == torch.float8_e4m3fn:
        tensors[bad].view(torch.uint8).view(-1)[-1] = 0x7F
    else:
        tensors[bad].view(-1)[-1] = float("nan")
    source = save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{bad}': .*(nan|NaN)"):
        read_split_experts(source, "x", shape_of(2, 256, 128))


@rows("value", *WRONG, 3.0)
def test_g45_mxfp4_scales_in_fp32_must_be_powers_of_two(tmp_path: Path, value: float) -> None:
    tensors, _ = linear_tensors("l", random_bf16(4, 64), "mxfp4")
    tensors["l.weight_scale"] = torch.exp2(tensors["l.weight_scale"].float() - 127)
    read_linear(save(tmp_path / "good", tensors), "l")
    tensors["l.weight_scale"][2, 0] = value
    refused(tmp_path, tensors, rf"'l\.weight_scale': MXFP4 scales must be powers of two, found {value}")


@rows("name", "x.gate_up_proj_scales", "x.down_proj_scales")
def test_g45_gpt_oss_scales(tmp_path: Path, name: str) -> None:
    tensors, _ = fused_experts(3, 64, 96, published=True)
    tensors[name][2, 5, 1] = 255
    source = save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=rf"tensor '{name}': an E8M0 scale is 255"):
        read_gpt_oss_experts(source, "x", shape_of(3, 64, 96))
