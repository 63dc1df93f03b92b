"""Experts of every kind of checkpoint, whole, against the dense matrices they were made from; and the refusals."""

from pathlib import Path

import pytest
import torch

from loaders.errors import CheckpointError
from loaders.experts import ExpertNames, read_gpt_oss_experts, read_split_experts
from moe import ExpertShape
from moe.formats import Mxfp4Weight
from tests.loaders.expert_files import FORMATS, Tensors, fused_experts, random_bf16, save, shape_of, split_experts
from tests.tables import rows

E, H, I = 3, 64, 96
SHAPE = shape_of(E, H, I)


@rows("published", True, False)
def test_gpt_oss_experts_are_separated_into_gate_and_up(tmp_path: Path, published: bool) -> None:
    tensors, meant = fused_experts(E, H, I, published=published)
    source = save(tmp_path, tensors)
    experts = read_gpt_oss_experts(source, "x", SHAPE)
    assert experts.format_name == ("mxfp4" if published else "bf16")
    assert torch.equal(experts.w13.dequantize(), meant["w13"])
    assert torch.equal(experts.w2.dequantize(), meant["w2"])
    assert experts.b13 is not None
    assert experts.b2 is not None
    assert torch.equal(experts.b13, meant["b13"])
    assert torch.equal(experts.b2, meant["b2"])
    source.finish()


def test_row_order_of_a_hand_made_gpt_oss_tensor(tmp_path: Path) -> None:
    """Rows 0..5 are g0 u0 g1 u1 g2 u2; scale byte 127 + row makes each row recognisable."""
    rows = torch.arange(6, dtype=torch.uint8)
    tensors = {
        "x.gate_up_proj_blocks": torch.full((1, 6, 1, 16), 0x22, dtype=torch.uint8),
        "x.gate_up_proj_scales": (127 + rows).reshape(1, 6, 1),
        "x.gate_up_proj_bias": rows.bfloat16().reshape(1, 6),
        "x.down_proj_blocks": torch.zeros((1, 32, 1, 16), dtype=torch.uint8),
        "x.down_proj_scales": torch.zeros((1, 32, 1), dtype=torch.uint8),
        "x.down_proj_bias": torch.zeros((1, 32)).bfloat16(),
    }
    with pytest.raises(CheckpointError, match="intermediate_size is 3: MXFP4 needs a multiple of 32"):
        read_gpt_oss_experts(save(tmp_path / "3", tensors), "x", shape_of(1, 32, 3))
    for name in ("blocks", "scales", "bias"):
        tensors[f"x.gate_up_proj_{name}"] = (
            tensors[f"x.gate_up_proj_{name}"].repeat_interleave(11, 1)[:, :64].contiguous()
        )
    experts = read_gpt_oss_experts(save(tmp_path / "32", tensors), "x", shape_of(1, 32, 32))
    stored = rows.repeat_interleave(11)[:64].float()
    assert torch.equal(experts.b13[0].float(), torch.cat([stored[0::2], stored[1::2]]))
    assert torch.equal(experts.w13.dequantize()[0, :, 0].log2(), torch.cat([stored[0::2], stored[1::2]]))


@rows("published", True, False)
def test_every_missing_gpt_oss_tensor_is_named(tmp_path: Path, published: bool) -> None:
    tensors, _ = fused_experts(E, H, I, published=published)
    for missing in tensors:
        source = save(tmp_path, {name: t for name, t in tensors.items() if name != missing})
        with pytest.raises(CheckpointError, match=f"'{missing}'"):
            read_gpt_oss_experts(source, "x", SHAPE)


def test_half_a_gpt_oss_scale_set_is_refused(tmp_path: Path) -> None:
    tensors, _ = fused_experts(E, H, I, published=True)
    without_scales = {name: t for name, t in tensors.items() if name != "x.down_proj_scales"}
    with pytest.raises(CheckpointError, match=r"'x\.down_proj_blocks': MXFP4 blocks without their scale"):
        read_gpt_oss_experts(save(tmp_path, without_scales), "x", SHAPE)
    without_blocks = {name: t for name, t in tensors.items() if name != "x.gate_up_proj_blocks"}
    with pytest.raises(CheckpointError, match=r"'x\.gate_up_proj_scales': a scale without its weight"):
        read_gpt_oss_experts(save(tmp_path, without_blocks), "x", SHAPE)


def test_published_and_dense_gpt_oss_tensors_together_are_refused(tmp_path: Path) -> None:
    tensors = fused_experts(E, H, I, published=True)[0] | fused_experts(E, H, I, published=False)[0]
    with pytest.raises(CheckpointError, match=r"stands beside the dense 'x\.gate_up_proj'"):
        read_gpt_oss_experts(save(tmp_path, tensors), "x", SHAPE)


@rows("published", True, False)
def test_gpt_oss_shapes_and_dtypes_are_checked(tmp_path: Path, published: bool) -> None:
    tensors, _ = fused_experts(E, H, I, published=published)
    for name, tensor in tensors.items():
        source = save(tmp_path, tensors | {name: tensor[:1]})
        with pytest.raises(CheckpointError, match=rf"'{name}': expected shape \[3, .*\], found \[1, "):
            read_gpt_oss_experts(source, "x", SHAPE)
        source = save(tmp_path, tensors | {name: tensor.to(torch.int32)})
        with pytest.raises(CheckpointError, match=f"'{name}': expected dtype .*, found int32"):
            read_gpt_oss_experts(source, "x", SHAPE)


def read(tmp_path: Path, tensors: Tensors, shape: ExpertShape = SHAPE) -> None:
    read_split_experts(save(tmp_path, tensors), "x", shape)


@rows("kind", *FORMATS)
def test_split_experts_of_every_format(tmp_path: Path, kind: str) -> None:
    tensors, w13, w2 = split_experts(kind, E, H, I)
    source = save(tmp_path, tensors)
    experts = read_split_experts(source, "x", SHAPE)
    assert experts.format_name == kind
    padded = 128 if kind == "fp8_block" else I
    assert experts.intermediate_size == padded
    gate, up = experts.w13.dequantize().split(padded, 1)
    assert torch.equal(torch.cat([gate[:, :I], up[:, :I]], 1), w13)
    assert torch.equal(experts.w2.dequantize()[:, :, :I], w2)
    assert not gate[:, I:].any()
    assert not experts.w2.dequantize()[:, :, I:].any()
    source.finish()


@rows("scale_dtype", torch.float8_e8m0fnu, torch.float32)
def test_deepseek_v4_experts_become_canonical_mxfp4(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    tensors: Tensors = {}
    meant: dict[str, list[torch.Tensor]] = {"w1": [], "w3": [], "w2": []}
    for e in range(E):
        for index, (name, matrices) in enumerate(meant.items()):
            weight = Mxfp4Weight.quantize(random_bf16(*((H, I) if name == "w2" else (I, H)), seed=10 * e + index))
            e8m0 = weight.scales.view(torch.float8_e8m0fnu)
            tensors[f"layers.4.ffn.experts.{e}.{name}.weight"] = weight.codes.view(torch.int8)
            tensors[f"layers.4.ffn.experts.{e}.{name}.scale"] = (
                e8m0 if scale_dtype == torch.float8_e8m0fnu else e8m0.float()
            )
            matrices.append(weight.dequantize())
    source = save(tmp_path, tensors)
    names = ExpertNames(gate="w1", up="w3", down="w2")
    experts = read_split_experts(source, "layers.4.ffn.experts", SHAPE, names=names)
    assert experts.format_name == "mxfp4"
    w13 = torch.cat([torch.stack(meant["w1"]), torch.stack(meant["w3"])], 1)
    assert torch.equal(experts.w13.dequantize(), w13)
    assert torch.equal(experts.w2.dequantize(), torch.stack(meant["w2"]))
    source.finish()


def test_fp8_experts_with_e8m0_block_scales(tmp_path: Path) -> None:
    tensors, w13, _ = split_experts("fp8_block", E, 128, 128)
    for name in [name for name in tensors if name.endswith("scale_inv")]:
        tensors[name] = torch.full((1, 1), 0.5).to(torch.float8_e8m0fnu)
    experts = read_split_experts(save(tmp_path, tensors), "x", shape_of(E, 128, 128))
    assert experts.format_name == "fp8_block"
    assert torch.equal(experts.w13.select(2).dequantize()[:128], tensors["x.2.gate_proj.weight"].float() * 0.5)
    assert experts.w13.shape == w13.shape


@rows("kind, suffix", ("nvfp4", "weight_scale_2"), ("fp8_tensor", "weight_scale"))
def test_scales_are_per_expert_where_gate_and_up_agree_and_per_half_where_not(
    tmp_path: Path, kind: str, suffix: str
) -> None:
    tensors, _, w2 = split_experts(kind, E, H, I)
    field = "scale_2" if kind == "nvfp4" else "scale"
    for e in range(E):
        tensors[f"x.{e}.up_proj.{suffix}"] = tensors[f"x.{e}.gate_proj.{suffix}"]
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    same = read_split_experts(save(tmp_path, tensors), "x", SHAPE)
    assert getattr(same.w13, field).shape == (E,)
    tensors[f"x.1.up_proj.{suffix}"] = torch.tensor(7.0)
    differ = read_split_experts(save(tmp_path, tensors), "x", SHAPE)
    assert getattr(differ.w13, field).shape == (E, 2)
    assert getattr(differ.w13, field)[1, 1] == 7
    assert torch.equal(differ.w13.dequantize()[1, :I], same.w13.dequantize()[1, :I])
    assert torch.equal(differ.w2.dequantize(), w2)


def test_a_missing_nvfp4_input_scale_is_the_largest_of_the_layer(tmp_path: Path) -> None:
    tensors, _, _ = split_experts("nvfp4", E, H, I)
    for e, value in enumerate((1.0, 4.0, 2.0)):
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"x.{e}.{name}.input_scale"] = torch.tensor(value)
    for name in ("x.0.gate_proj.input_scale", "x.0.up_proj.input_scale", "x.2.down_proj.input_scale"):
        del tensors[name]
    experts = read_split_experts(save(tmp_path, tensors), "x", SHAPE)
    assert experts.w13.input_scale.tolist() == [4.0, 4.0, 2.0]  # type: ignore[attr-defined]
    assert experts.w2.input_scale.tolist() == [1.0, 4.0, 4.0]  # type: ignore[attr-defined]


def test_nvfp4_without_any_input_scale(tmp_path: Path) -> None:
    tensors = {n: t for n, t in split_experts("nvfp4", E, H, I)[0].items() if not n.endswith("input_scale")}
    experts = read_split_experts(save(tmp_path, tensors), "x", SHAPE)
    assert experts.w13.input_scale is None  # type: ignore[attr-defined]


def test_formats_that_differ_within_a_layer_are_refused(tmp_path: Path) -> None:
    tensors, other = split_experts("fp8_block", E, H, I)[0], split_experts("bf16", E, H, I)[0]
    tensors["x.2.up_proj.weight"] = other["x.2.up_proj.weight"]
    del tensors["x.2.up_proj.weight_scale_inv"]
    words = r"'x\.2\.up_proj\.weight': bf16 \(bfloat16\), but 'x\.0\.gate_proj\.weight' .* is fp8_block"
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path, tensors)


@rows("kind", *FORMATS)
def test_every_missing_tensor_of_an_expert_is_noticed(tmp_path: Path, kind: str) -> None:
    tensors, _, _ = split_experts(kind, E, H, I)
    for missing in (name for name in tensors if name.startswith("x.1.") and not name.endswith("input_scale")):
        with pytest.raises(CheckpointError, match=r"x\.1\."):
            read(tmp_path, {name: t for name, t in tensors.items() if name != missing})


@rows("kind", *FORMATS)
def test_sizes_are_compared_with_the_config(tmp_path: Path, kind: str) -> None:
    tensors, _, _ = split_experts(kind, E, H, I)
    with pytest.raises(CheckpointError, match=r"'x\.0\.gate_proj\.weight': expected \[96, 128\] .* found \[96, 64\]"):
        read(tmp_path, tensors, shape_of(E, 128, I))


def test_an_expert_more_than_the_config_says_is_left_over(tmp_path: Path) -> None:
    source = save(tmp_path, split_experts("bf16", E, H, I)[0])
    read_split_experts(source, "x", shape_of(E - 1, H, I))
    with pytest.raises(CheckpointError, match=r"3 tensors belong to no part of the model: .*'x\.2\.gate_proj"):
        source.finish()
