"""What the rival's adapter does by itself: row order and the logits that stand for ids and weights."""

import dataclasses

import pytest
import torch

from benchmarks import rival_triton_kernels as rival
from benchmarks.moe_cases import CASES, random_experts, routing
from moe.config import Activation, RoutingConfig, RoutingMethod
from moe.errors import UnsupportedPathError
from moe.routing import route

CPU = torch.device("cpu")


def test_gate_and_up_rows_alternate() -> None:
    rows = torch.arange(6).view(1, 6, 1).expand(2, 6, 3)
    assert rival.alternating(rows)[1, :, 2].tolist() == [0, 3, 1, 4, 2, 5]
    assert rival.alternating(torch.arange(4).view(1, 4)).tolist() == [[0, 2, 1, 3]]


def test_a_router_turns_the_logits_into_the_same_ids_and_weights() -> None:
    case = CASES["gpt-oss-20b"]
    topk = routing(case, 16, "zipf", CPU, seed=1)
    config = RoutingConfig(method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=case.num_experts, top_k=case.top_k)
    routed = route(rival.logits_for(topk, case.num_experts), config)
    order, expected_order = routed.ids.argsort(dim=1), topk.ids.argsort(dim=1)
    assert torch.equal(routed.ids.gather(1, order), topk.ids.gather(1, expected_order))
    torch.testing.assert_close(routed.weights.gather(1, order), topk.weights.gather(1, expected_order))


def test_what_it_cannot_compute_is_refused() -> None:
    case = dataclasses.replace(CASES["gpt-oss-20b"], num_experts=1, top_k=1, hidden_size=64, intermediate_size=64)
    with pytest.raises(UnsupportedPathError, match="MXFP4"):
        rival.prepare(random_experts(case, "bf16", CPU, seed=0), case.activation)
    with pytest.raises(UnsupportedPathError, match="activation"):
        rival.prepare(random_experts(case, "mxfp4", CPU, seed=0), Activation())
