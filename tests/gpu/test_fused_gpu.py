"""The fused kernels of the forward pass on a card, in bf16 against the torch operators that they replace."""

import pytest
import torch
from torch.nn.functional import linear
from torch.nn.functional import rms_norm as torch_rms_norm

from model import few_rows
from model.embedding import OutputHead
from model.gpu_kernels import add_rms_norm, rms_norm
from model.moe_layer import Gate
from moe.config import RoutingConfig, RoutingMethod
from moe.kernels import router
from moe.routing import route

pytestmark = pytest.mark.gpu


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape)))


@pytest.mark.parametrize("hidden", [96, 2880, 7168])
@pytest.mark.parametrize("num_tokens", [1, 7, 2048])
def test_norms_round_as_torch_does(num_tokens: int, hidden: int) -> None:
    x, delta, weight = normal(num_tokens, hidden).bfloat16(), normal(hidden, num_tokens).t().bfloat16(), normal(hidden)
    delta = delta.contiguous()
    total, normed = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    want = torch_rms_norm((x + delta).float(), (hidden,), weight, 1e-5)
    assert (normed.float() - want).abs().max() <= want.abs().max() * 2**-8  # one rounding to bf16
    assert torch.equal(rms_norm(x + delta, weight, 1e-5), normed)


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 500, 513, 4096])
@pytest.mark.parametrize(("num_experts", "top_k"), [(32, 4), (128, 4), (6, 2)])
def test_the_router_chooses_as_torch_does(num_tokens: int, num_experts: int, top_k: int) -> None:
    config = RoutingConfig(method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=num_experts, top_k=top_k)
    x, weight = normal(num_tokens, 2880).bfloat16(), (normal(num_experts, 2880) * 0.05).bfloat16()
    bias = normal(num_experts)
    got = router.route(x, weight, bias, config)
    logits = linear(x.double(), weight.double(), bias.double())
    want = route(logits, config)
    differs = (got.ids != want.ids).any(dim=1)
    best = logits.sort(dim=1, descending=True).values[:, : top_k + 1]
    is_near_tie = (best[:, :-1] - best[:, 1:]).amin(dim=1) < 1e-4
    assert not (differs & ~is_near_tie).any()
    assert (got.weights - want.weights)[~differs].abs().max() < 1e-4


@pytest.mark.parametrize("num_tokens", [1, 17, 513])
def test_bf16_logits_are_rounded_once_from_fp32_sums(num_tokens: int) -> None:
    """By the gate's GEMM and by the fused router; sums of small integers are exact in fp32, in bf16 they are not."""
    config = RoutingConfig(method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=32, top_k=4)
    g = torch.Generator("cuda").manual_seed(num_tokens)
    x = torch.randint(-2, 3, (num_tokens, 2880), device="cuda", generator=g).bfloat16()
    weight = torch.randint(-60, 61, (32, 2880), device="cuda", generator=g).bfloat16()
    bias = torch.randint(-2, 3, (32,), device="cuda", generator=g).float()
    want = linear(x.double(), weight.double(), bias.double()).bfloat16()
    assert torch.equal(Gate(weight, bias, torch.bfloat16)(x), want)
    got = router.route(x, weight, bias, config, logits_dtype=torch.bfloat16)
    assert torch.equal(got.ids, route(want, config).ids)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(5120, 2880), (2880, 4096), (40, 700), (576, 7168)])
@pytest.mark.parametrize("num_rows", [1, 5, 16])
def test_few_rows_are_multiplied_as_in_torch(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    """Many times: the programs of a block arrive in any order, and each launch finds the counters at zero."""
    x = normal(num_rows, num_inputs + 8).bfloat16()[:, :num_inputs]
    weight, bias = (normal(num_outputs, num_inputs) * 0.05).bfloat16(), normal(num_outputs).bfloat16()
    got = few_rows.linear(x, weight, bias)
    want = linear(x.double(), weight.double(), bias.double())
    assert (got.double() - want).abs().max() <= want.abs().max() * 2**-8  # one rounding to bf16
    for _ in range(200):
        assert torch.equal(few_rows.linear(x, weight, bias), got)


@pytest.mark.parametrize("num_rows", [1, 33])
def test_the_head_gives_fp32_sums(num_rows: int) -> None:
    x, weight = normal(num_rows, 2880).bfloat16(), (normal(5000, 2880) * 0.05).bfloat16()
    out = torch.full((num_rows, 5000), float("nan"), device="cuda")
    assert OutputHead(weight)(x, out) is out
    want = linear(x.double(), weight.double())
    assert (out.double() - want).abs().max() < 1e-4
    assert torch.equal(OutputHead(weight)(x), out)


def test_a_chain_of_captured_kernels_gives_the_same_bits_each_time() -> None:
    """Norm, router and projections launched on each other's heels, as in a decode step, beside a busy stream."""
    config = RoutingConfig(method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=32, top_k=4)
    x, norm = normal(3, 2880).bfloat16(), normal(2880)
    up, down = (normal(4096, 2880) * 0.02).bfloat16(), (normal(2880, 4096) * 0.02).bfloat16()
    gate = (normal(32, 2880) * 0.05).bfloat16()

    def run() -> list[torch.Tensor]:
        total, normed, kept = x, rms_norm(x, norm, 1e-5), []
        for _ in range(24):
            routed = router.route(normed, gate, None, config)
            delta = few_rows.linear(few_rows.linear(normed, up, None), down, None)
            total, normed = add_rms_norm(total, delta, norm, 1e-5)
            kept += [total, routed.ids, routed.weights]
        return kept

    want = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    busy, matrix = torch.cuda.Stream(), normal(2048, 2048)
    for _ in range(300):
        with torch.cuda.stream(busy):
            matrix @ matrix
        for tensor in got:
            tensor.fill_(-1)
        graph.replay()
        assert all(map(torch.equal, got, want))
