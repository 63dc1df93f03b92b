"""Cases of the MoE benchmark: stated numbers of active experts, repeatable routings, floors."""

from typing import Any

import pytest
import torch

from benchmarks.moe_cases import CASES, LayerCase, id_sets, random_experts, routing
from tests.tables import rows

CPU = torch.device("cpu")
FLOORS_US = {1: 17.6, 4: 70.5, 8: 83.7, 16: 119.0, 64: 141.0, 1024: 261.3, 4096: 1045.3}


@rows("model, case", *CASES.items())
@rows("num_tokens", 1, 4, 8, 16, 64, 256, 1024)
def test_uniform_sets_touch_exactly_the_stated_number_of_experts(model: Any, case: Any, num_tokens: Any) -> None:
    for topk in id_sets(case, num_tokens, "uniform", CPU, 3):
        assert topk.ids.unique().numel() == case.active(num_tokens)
        assert topk.ids.shape == topk.weights.shape == (num_tokens, case.top_k)


@rows("kind", "uniform", "zipf")
def test_a_token_never_gets_an_expert_twice_and_weights_sum_to_one(kind: str) -> None:
    case = CASES["gpt-oss-20b"]
    topk = routing(case, 256, kind, CPU, seed=1)
    ids = topk.ids.sort(dim=1).values
    assert bool((ids[:, 1:] > ids[:, :-1]).all())
    assert int(ids.min()) >= 0
    assert int(ids.max()) < case.num_experts
    torch.testing.assert_close(topk.weights.sum(-1), torch.ones(256))


def test_sets_differ_from_each_other_but_not_from_run_to_run() -> None:
    first, second = (id_sets(CASES["gpt-oss-120b"], 16, "uniform", CPU, 20) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.weights, b.weights)
    assert len({tuple(topk.ids.flatten().tolist()) for topk in first}) == 20


def test_zipf_loads_its_favourite_expert_far_more_than_uniform() -> None:
    case = CASES["gpt-oss-120b"]
    uniform, zipf = (routing(case, 1024, kind, CPU, seed=2).ids for kind in ("uniform", "zipf"))
    assert zipf.flatten().bincount().max() > 5 * uniform.flatten().bincount().max()


def test_floors_are_those_of_the_table_that_the_aims_come_from() -> None:
    case = CASES["gpt-oss-20b"]
    floors_us = {tokens: case.floor_us("mxfp4", tokens, case.active(tokens)) for tokens in FLOORS_US}
    assert floors_us == pytest.approx(FLOORS_US, abs=0.06)


@rows("format_name", "mxfp4", "nvfp4", "fp8_block", "bf16")
def test_random_weights_are_of_the_usual_size_in_every_format(format_name: str) -> None:
    case = LayerCase(
        model="tiny", num_experts=2, top_k=1, hidden_size=256, intermediate_size=128,
        activation=CASES["deepseek-v3"].activation, has_bias=False, num_active={},
    )  # fmt: skip
    experts = random_experts(case, format_name, CPU, seed=0)
    assert experts.format_name == format_name
    for weight, shape in ((experts.w13, (256, 256)), (experts.w2, (256, 128))):
        dense = weight.select(1).dequantize()
        assert dense.shape == shape
        assert 0.01 < float(dense.std()) < 0.04
        assert not torch.equal(dense, weight.select(0).dequantize())
