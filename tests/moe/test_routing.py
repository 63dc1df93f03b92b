"""Routing: golden values, agreement with transformers' own routers, hostile rows, ties, and one scaling factor."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, GptOssConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

from moe import BypassedTopK, MoeConfigError, RoutingConfig, RoutingMethod, StandardTopK
from moe.routing import route
from tests.tables import rows

SOFTMAX, SIGMOID, SOFTPLUS = RoutingMethod
GPT_OSS = RoutingConfig(method=SOFTMAX, num_experts=8, top_k=4)
TOY_V3 = RoutingConfig(
    method=SIGMOID, num_experts=8, top_k=2, num_groups=4, num_kept_groups=2, routed_scaling_factor=2.5
)
V4 = RoutingConfig(method=SOFTPLUS, num_experts=6, top_k=2, routed_scaling_factor=1.5)
V3_LOGITS = torch.tensor([[2, -1, 0.5, 0.4, 1, 0.9, -2, 1.8]])
V3_BIAS = torch.tensor([0, 0, 0.3, 0.3, 0, 0, 0, 0.05])


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_id(topk: StandardTopK) -> list[dict[int, float]]:
    return [dict(zip(ids, ws, strict=True)) for ids, ws in zip(topk.ids.tolist(), topk.weights.tolist(), strict=True)]


@rows(
    "config, row, bias, ids, weights",
    (GPT_OSS, [0.1, 2, -1, 1.5, 0.3, 1.9, 0, -0.2], None, [1, 5, 3, 4], [0.371188, 0.335865, 0.225137, 0.067810]),
    (TOY_V3, V3_LOGITS[0].tolist(), V3_BIAS, [2, 3], [1.274333, 1.225667]),
    (V4, [1, -0.5, 2, 0, 3, -4.0], torch.tensor([0, 0.5, 0, 0, -0.3, 0]), [2, 4], [0.682682, 0.817318]),
)
def test_golden_values(
    config: RoutingConfig, row: list[float], bias: torch.Tensor | None, ids: list[int], weights: list[float]
) -> None:
    got = route(torch.tensor([row]), config, bias)
    assert (got.ids.dtype, got.weights.dtype) == (torch.int32, torch.float32)
    assert got.ids[0].tolist() == ids
    assert got.weights[0].tolist() == pytest.approx(weights, abs=1e-6)


def test_without_groups_others_are_chosen() -> None:
    ungrouped = route(V3_LOGITS, dataclasses.replace(TOY_V3, num_groups=1, num_kept_groups=1), V3_BIAS)
    assert sorted(ungrouped.ids[0].tolist()) == [2, 7]


@rows("num_experts", 4, 32, 128)
def test_agrees_with_the_router_of_gpt_oss(num_experts: int) -> None:
    router = GptOssTopKRouter(GptOssConfig(num_local_experts=num_experts, num_experts_per_tok=4, hidden_size=16))
    router.weight.data, router.bias.data = logits(num_experts, 16), logits(num_experts, seed=1)
    router_logits, scores, indices = router(logits(50, 16, seed=2))
    got = route(router_logits.detach(), RoutingConfig(method=SOFTMAX, num_experts=num_experts, top_k=4))
    assert torch.equal(got.ids.long(), indices)
    torch.testing.assert_close(got.weights, scores.detach())


@rows("shift", 0.0, -10.0, 7.0)
@rows("normalize", True, False)
def test_agrees_with_the_router_of_deepseek_v3(shift: float, normalize: bool) -> None:
    """A bias of -10 makes every corrected score negative: dropped groups must be -inf, not 0."""
    config = DeepseekV3Config(
        n_routed_experts=32, num_experts_per_tok=6, n_group=8, topk_group=3, hidden_size=16, norm_topk_prob=normalize,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    router = DeepseekV3TopkRouter(config)
    router.weight.data = logits(32, 16)
    router.e_score_correction_bias = shift + 0.1 * logits(32, seed=1)
    router_logits, weights, indices = router(logits(64, 16, seed=2))
    ours = RoutingConfig(
        method=SIGMOID, num_experts=32, top_k=6, num_groups=8, num_kept_groups=3, normalize=normalize,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    got = route(router_logits.detach(), ours, router.e_score_correction_bias)
    for mine, theirs in zip(by_id(got), by_id(StandardTopK(weights.detach(), indices)), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


@rows("normalize", True, False)
@rows("config", GPT_OSS, TOY_V3, V4)
def test_the_factor_is_applied_once_with_and_without_normalizing(normalize: bool, config: RoutingConfig) -> None:
    x = logits(20, config.num_experts)
    one, scaled = (
        route(x, dataclasses.replace(config, normalize=normalize, routed_scaling_factor=factor)) for factor in (1, 2.5)
    )
    assert torch.equal(one.ids, scaled.ids)
    torch.testing.assert_close(scaled.weights, 2.5 * one.weights)
    assert bool((one.weights.sum(-1) - 1).abs().max() < 1e-5) == normalize


def test_unnormalized_softmax_weights_are_those_of_all_experts() -> None:
    x = logits(9, 8)
    got = route(x, dataclasses.replace(GPT_OSS, normalize=False))
    torch.testing.assert_close(got.weights, x.softmax(-1).gather(1, got.ids.long()))


hostile = st.sampled_from([float("nan"), float("inf"), float("-inf"), 0.0, -1e38, 1e38, 3.0, -2.5])


@settings(max_examples=150, deadline=None)
@given(data=st.data(), config=st.sampled_from([GPT_OSS, TOY_V3, V4]), has_bias=st.booleans())
def test_any_row_gets_distinct_ids_in_range_and_spoils_no_other(
    data: st.DataObject, config: RoutingConfig, has_bias: bool
) -> None:
    num_experts = config.num_experts
    bias = logits(num_experts, seed=4) if has_bias else None
    x = logits(5, num_experts, seed=3)
    clean = route(x, config, bias)
    x[2] = torch.tensor(data.draw(st.lists(hostile, min_size=num_experts, max_size=num_experts)))
    got = route(x, config, bias)
    for ids in got.ids.tolist():
        assert len(set(ids) & set(range(num_experts))) == config.top_k
    others = [0, 1, 3, 4]
    assert torch.equal(got.ids[others], clean.ids[others])
    assert torch.equal(got.weights[others], clean.weights[others])


@rows("value", 0.0, float("nan"), float("-inf"), float("inf"))
def test_equal_logits_go_to_the_lowest_ids(value: float) -> None:
    flat = torch.full((3, 256), value)
    for method in RoutingMethod:
        got = route(flat, RoutingConfig(method=method, num_experts=256, top_k=8))
        assert got.ids.tolist() == [list(range(8))] * 3
    grouped = RoutingConfig(method=SIGMOID, num_experts=256, top_k=8, num_groups=8, num_kept_groups=4)
    assert route(flat, grouped).ids.tolist() == [list(range(8))] * 3


def test_nan_never_displaces_a_real_expert_of_a_kept_group() -> None:
    x = torch.tensor([[float("nan"), 1.0, 0.5, float("nan"), -3.0, -4.0, -5.0, -6.0]])
    got = route(x, dataclasses.replace(TOY_V3, num_groups=2, num_kept_groups=1))
    assert got.ids[0].tolist() == [1, 2]
    assert bool(got.weights.isfinite().all())


def test_close_biases_are_not_rounded_together() -> None:
    """Biases between 6.82 and 7.06, as published; bf16 would leave 8 distinct values of 256."""
    bias = torch.linspace(6.82, 7.06, 256)[torch.randperm(256, generator=torch.Generator().manual_seed(1))]
    config = RoutingConfig(method=SIGMOID, num_experts=256, top_k=8)
    exact = bias.topk(8).indices
    for dtype in (torch.float32, torch.bfloat16):
        got = route(torch.zeros(1, 256, dtype=dtype), config, bias)
        assert set(got.ids[0].tolist()) == set(exact.tolist())
    rounded = route(torch.zeros(1, 256), config, bias.bfloat16())
    assert set(rounded.ids[0].tolist()) != set(exact.tolist())


def test_weights_come_from_the_unbiased_scores() -> None:
    config = dataclasses.replace(V4, normalize=False, routed_scaling_factor=1.0)
    got = route(torch.tensor([[0.0, 3, 3, 3, 3, 1]]), config, torch.tensor([5.0, 0, 0, 0, 0, 4.0]))
    assert got.ids.tolist() == [[0, 5]]
    torch.testing.assert_close(got.weights[0], torch.nn.functional.softplus(torch.tensor([0.0, 1.0])).sqrt())


@rows("dtype", torch.bfloat16, torch.float16, torch.float64)
def test_low_precision_logits_are_routed_in_fp32(dtype: torch.dtype) -> None:
    x = logits(7, 8).to(dtype)
    got, want = route(x, TOY_V3), route(x.float(), TOY_V3)
    assert torch.equal(got.ids, want.ids)
    assert torch.equal(got.weights, want.weights)


def test_bypassed_routing_is_the_same_when_it_is_done() -> None:
    bypassed = BypassedTopK(V3_LOGITS, TOY_V3, V3_BIAS).to_standard()
    want = route(V3_LOGITS, TOY_V3, V3_BIAS)
    assert torch.equal(bypassed.ids, want.ids)
    assert torch.equal(bypassed.weights, want.weights)
    assert want.to_standard() is want


@rows("config", GPT_OSS, TOY_V3, V4)
def test_zero_tokens_route_to_nothing(config: RoutingConfig) -> None:
    got = route(torch.empty(0, config.num_experts), config)
    assert got.ids.shape == got.weights.shape == (0, config.top_k)


@rows(
    "changes, message",
    ({"top_k": 9}, "top_k is 9"), ({"top_k": 0}, "top_k is 0"), ({"top_k": 5}, "hold only 4 experts"),
    ({"num_groups": 3}, "num_groups is 3"), ({"num_kept_groups": 5}, "num_kept_groups is 5"),
)  # fmt: skip
def test_bad_settings_name_field_value_and_rule(changes: dict[str, object], message: str) -> None:
    with pytest.raises(MoeConfigError, match=message):
        dataclasses.replace(TOY_V3, **changes)
