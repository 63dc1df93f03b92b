"""The twin itself, against the formula written out for single tokens, and with every rounding of its inputs."""

import dataclasses
import itertools

import pytest
import torch

from moe import StandardTopK, WeightFormatError
from moe.check.reference import reference_moe
from moe.formats import ExpertWeights, Weight
from moe.formats.activation_quant import fp8_groups, fp8_static, nvfp4_static
from tests.moe.backends.hostile import shard
from tests.moe.moe_layers import FORMATS, GPT_OSS, PLAIN, make_experts, random_topk, relative_error
from tests.tables import rows


def x_of(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(7))


@rows("format_name", *FORMATS)
@rows("bias", True, False)
def test_the_twin_is_the_formula(format_name: str, bias: bool) -> None:
    experts, x, topk = make_experts(format_name, bias=bias), x_of(6), random_topk(6, 4)
    topk.ids[2, 1] = -1
    w13, w2 = experts.w13.dequantize().double(), experts.w2.dequantize().double()
    b13, b2 = (experts.b13, experts.b2) if bias else (torch.zeros(4, 256), torch.zeros(4, 64))
    want = torch.zeros(6, 64, dtype=torch.float64)
    for t, slot in itertools.product(range(6), range(2)):
        expert, weight = topk.ids[t, slot], topk.weights[t, slot].double()
        if expert >= 0:
            h = w13[expert] @ x[t].double() + b13[expert]
            gate, up = h[:128].clamp(max=7), h[128:].clamp(-7, 7)
            want[t] += weight * (w2[expert] @ (gate * torch.sigmoid(1.702 * gate) * (up + 1)) + b2[expert])
    got = reference_moe(x, topk, experts, GPT_OSS)
    assert got.dtype == torch.float32
    assert relative_error(got, want) < 1e-6


def test_a_shard_answers_for_its_own_ids_only() -> None:
    experts, x, topk = make_experts("mxfp4"), x_of(5), random_topk(5, 4)
    parts = [reference_moe(x, topk, shard(experts, ep=(2, i)), GPT_OSS, first_expert=2 * i) for i in (0, 1)]
    assert relative_error(sum(parts), reference_moe(x, topk, experts, GPT_OSS)) < 1e-6


def with_input_scales(experts: ExpertWeights) -> ExpertWeights:
    """Static scales that fit the tokens and their activations; of those of gate and up the larger counts."""
    num_experts = experts.num_experts

    def scale(weight: Weight, amax: float) -> Weight:
        divisor = 2688 if experts.format_name == "nvfp4" else 448
        return dataclasses.replace(weight, input_scale=torch.full((num_experts,), amax / divisor))

    w13 = scale(experts.w13, 4.0)
    halves = torch.stack([0.5 * w13.input_scale, w13.input_scale], dim=-1)
    return dataclasses.replace(experts, w13=dataclasses.replace(w13, input_scale=halves), w2=scale(experts.w2, 2e4))


@rows(
    "format_name, rounding, low, high",
    ("fp8_block", fp8_groups, 5e-3, 5e-2),
    ("fp8_tensor", fp8_static, 5e-3, 6e-2),
    ("nvfp4", nvfp4_static, 3e-2, 2e-1),
)
def test_rounding_inputs_costs_what_formats_cost(format_name: str, rounding: object, low: float, high: float) -> None:
    experts = make_experts(format_name, bias=False)
    if rounding is not fp8_groups:
        experts = with_input_scales(experts)
    x, topk = x_of(50), random_topk(50, 4)
    exact = reference_moe(x, topk, experts, PLAIN)
    error = relative_error(reference_moe(x, topk, experts, PLAIN, quantize_input=rounding), exact)  # type: ignore[arg-type]
    assert low < error < high


def test_rounding_by_groups_keeps_every_group_apart_and_takes_short_ones() -> None:
    x = torch.ones(2, 300)
    x[:, 128:256] *= 1000
    x[1] *= 3
    x[:, 0] = 1 / 3
    got = fp8_groups(x, make_experts("bf16").w13)
    assert got.shape == (2, 300)
    torch.testing.assert_close(got, x, rtol=2**-4, atol=0)
    torch.testing.assert_close(got[:, 1:], x[:, 1:])
    assert not torch.equal(got[:, 0], x[:, 0])


@rows("rounding", fp8_static, nvfp4_static)
def test_static_rounding_needs_a_scale(rounding: object) -> None:
    topk = StandardTopK(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(WeightFormatError, match="without input_scale"):
        reference_moe(x_of(1), topk, make_experts("nvfp4"), PLAIN, quantize_input=rounding)  # type: ignore[arg-type]
