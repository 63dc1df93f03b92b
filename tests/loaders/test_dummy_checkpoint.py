"""Dummy weights: deterministic, of sane size in every format, readable by the same readers as real ones."""

import pytest
import torch

from loaders.dummy import DummyCheckpoint
from loaders.errors import CheckpointError
from loaders.experts import read_gpt_oss_experts, read_split_experts
from loaders.quant import read_linear
from tests.loaders.expert_files import FORMATS, fused_experts, linear_tensors, random_bf16, shape_of, split_experts
from tests.tables import rows

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def shapes_of(tensors: dict[str, torch.Tensor]) -> Shapes:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_contents_depend_on_name_and_seed_only() -> None:
    shapes: Shapes = {"a.weight": (torch.bfloat16, (8, 8)), "b.weight": (torch.bfloat16, (8, 8))}
    source, again = DummyCheckpoint(shapes, seed=1), DummyCheckpoint(shapes, seed=1)
    first = source.tensor("a.weight")
    assert torch.equal(first, again.tensor("a.weight"))
    assert torch.equal(first, source.tensor("a.weight"))
    assert not torch.equal(first, source.tensor("b.weight"))
    assert not torch.equal(first, DummyCheckpoint(shapes, seed=2).tensor("a.weight"))


@rows("kind", *FORMATS)
def test_dequantized_weights_are_small_and_finite(kind: str) -> None:
    tensors, _ = linear_tensors("l", random_bf16(256, 256), kind)
    weight = read_linear(DummyCheckpoint(shapes_of(tensors)), "l")
    assert weight.format_name == kind
    dense = weight.dequantize()
    assert dense.isfinite().all()
    assert 0.01 < dense.std() < 0.03
    assert dense.mean().abs() < 0.002


@rows("kind", *FORMATS)
def test_split_experts_can_be_read_from_dummy_weights(kind: str) -> None:
    source = DummyCheckpoint(shapes_of(split_experts(kind, 2, 64, 96)[0]))
    experts = read_split_experts(source, "x", shape_of(2, 64, 96))
    assert experts.format_name == kind
    assert not torch.equal(experts.w2.select(0).dequantize(), experts.w2.select(1).dequantize())
    source.finish()


@rows("published", True, False)
def test_gpt_oss_experts_can_be_read_from_dummy_weights(published: bool) -> None:
    source = DummyCheckpoint(shapes_of(fused_experts(2, 64, 96, published=published)[0]))
    experts = read_gpt_oss_experts(source, "x", shape_of(2, 64, 96))
    assert experts.w13.dequantize().std() < 0.03
    source.finish()


def test_norms_are_ones_and_e8m0_scales_moderate() -> None:
    source = DummyCheckpoint(
        {"model.layers.0.input_layernorm.weight": (torch.bfloat16, (5,)), "l.scale": (torch.float8_e8m0fnu, (4, 100))}
    )
    assert source.tensor("model.layers.0.input_layernorm.weight").tolist() == [1.0] * 5
    exponents = source.tensor("l.scale").view(torch.uint8)
    assert exponents.unique().tolist() == [119, 120]


def test_dtypes_without_a_meaning_are_refused() -> None:
    with pytest.raises(CheckpointError, match="dummy weights: tensor 'ids': no dummy contents for dtype int64"):
        DummyCheckpoint({"ids": (torch.int64, (2,))}).tensor("ids")


def test_missing_and_left_over_tensors_are_errors_here_too() -> None:
    source = DummyCheckpoint({"w": (torch.bfloat16, (2,))})
    with pytest.raises(CheckpointError, match="'x' is missing"):
        source.tensor("x")
    with pytest.raises(CheckpointError, match="1 tensors belong to no part"):
        source.finish()


@pytest.mark.gpu
def test_contents_are_made_on_the_device() -> None:
    device = torch.device("cuda")
    source = DummyCheckpoint(shapes_of(split_experts("mxfp4", 2, 64, 96)[0]), device=device)
    experts = read_split_experts(source, "x", shape_of(2, 64, 96))
    assert experts.w13.device.type == "cuda"
