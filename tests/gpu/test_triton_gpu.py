"""The triton backend on a card: every format and plan against the twin, graphs, determinism, position in the batch."""

from dataclasses import replace

import pytest
import torch

from moe import Activation, MoeA2ABackend, MoeBackend, MoeRunner, StandardDispatchOutput, StandardTopK
from moe.backends.triton.backend import TritonBackend, TritonMoeQuantInfo
from moe.backends.triton.plans import PlanTable
from moe.check.reference import reference_moe
from moe.formats import Bf16Weight, ExpertWeights, Fp8BlockWeight, Mxfp4Weight, Nvfp4Weight
from moe.kernels.plan import Plan
from moe.topology import Topology
from tests.gpu.common import FP8_PLAN
from tests.moe.configs import rank_config

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*deterministic.*")]
FORMATS = {"bf16": Bf16Weight, "fp8_block": Fp8BlockWeight, "mxfp4": Mxfp4Weight, "nvfp4": Nvfp4Weight}
GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
TOKENS = [1, 2, 3, 7, 16, 17, 64, 257, 1500]
E, K = 16, 4
TOLERANCE = 5e-3  # of the whole output; activations stay bf16, so what is left is rounding them and the result


class Layer:
    """Random experts on the card, prepared, with the twin's answer at hand."""

    def __init__(self, format_name: str, hidden: int, inter: int, activation: Activation = GPT_OSS) -> None:
        g = torch.Generator("cuda").manual_seed(hidden)
        quantize = FORMATS[format_name].quantize
        self.activation = activation
        self.experts = ExpertWeights(
            w13=quantize(torch.randn(E, 2 * inter, hidden, generator=g, device="cuda") * 3 * hidden**-0.5),
            w2=quantize(torch.randn(E, hidden, inter, generator=g, device="cuda") * inter**-0.5),
            b13=torch.randn(E, 2 * inter, generator=g, device="cuda"),
            b2=torch.randn(E, hidden, generator=g, device="cuda"),
        )
        self.config = rank_config(
            num_experts=E, hidden_size=hidden, intermediate_size=inter, top_k=K, activation=activation
        )
        self.info = TritonBackend().prepare(self.experts, self.config, Topology(device=torch.device("cuda")))
        self.runner = MoeRunner(MoeBackend.TRITON, MoeA2ABackend.NONE, self.config)

    def run(self, x: torch.Tensor, topk: StandardTopK, info: TritonMoeQuantInfo | None = None) -> torch.Tensor:
        return self.runner.run(StandardDispatchOutput(x, topk), info or self.info).hidden_states

    def error(self, x: torch.Tensor, topk: StandardTopK, out: torch.Tensor) -> float:
        want = reference_moe(x, topk, self.experts, self.activation)
        return float((out.float() - want).norm() / want.norm())


def make_inputs(num_tokens: int, hidden: int, seed: int = 0) -> tuple[torch.Tensor, StandardTopK]:
    g = torch.Generator("cuda").manual_seed(seed)
    ids = torch.rand(num_tokens, E - 1, generator=g, device="cuda").argsort(1)[:, :K].int()  # the last expert idles
    if num_tokens > 2:
        ids[0, 1] = -1
        ids[2] = -1
    x = torch.randn(num_tokens, hidden, generator=g, device="cuda").bfloat16()
    return x, StandardTopK(torch.rand(num_tokens, K, generator=g, device="cuda"), ids)


@pytest.fixture(autouse=True)
def poison() -> object:
    """Every uninitialised tensor starts as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(("hidden", "inter"), [(2880, 2880), (384, 288), (1440, 192)])
def test_agrees_with_the_twin(format_name: str, hidden: int, inter: int) -> None:
    layer = Layer(format_name, hidden, inter)
    for num_tokens in TOKENS:
        x, topk = make_inputs(num_tokens, hidden, num_tokens)
        out = layer.run(x, topk)
        is_fp8 = layer.info.plans.pick(num_tokens).fp8_activations
        assert layer.error(x, topk, out) < (FP8_PLAN if is_fp8 else TOLERANCE), num_tokens
        if num_tokens > 2:
            assert not out[2].any()


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("num_tokens", [5, 300])
def test_the_same_bits_every_time_at_every_position_and_in_a_graph(num_tokens: int, format_name: str) -> None:
    layer = Layer(format_name, 384, 288)
    x, topk = make_inputs(num_tokens, 384)
    out = layer.run(x, topk)
    others, others_topk = make_inputs(num_tokens, 384, seed=1)
    for mine, theirs in ((x, others), (topk.weights, others_topk.weights), (topk.ids, others_topk.ids)):
        theirs[num_tokens // 2] = mine[1]
    assert torch.equal(layer.run(others, others_topk)[num_tokens // 2], out[1]), "whoever shares the batch"
    order = torch.randperm(num_tokens, device="cuda")
    moved = layer.run(x[order], StandardTopK(topk.weights[order], topk.ids[order]))
    assert torch.equal(moved, out[order])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer.run(x, topk)
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, out)


@pytest.mark.parametrize("num_tokens", [6, 200])
def test_early_start_changes_no_bit(num_tokens: int) -> None:
    layer = Layer("mxfp4", 384, 288)
    x, topk = make_inputs(num_tokens, 384)
    outs = []
    for pdl in (False, True):
        plans = replace(layer.info.plans, steps=tuple((n, replace(p, pdl=pdl)) for n, p in layer.info.plans.steps))
        outs.append(layer.run(x, topk, replace(layer.info, plans=plans)))
    assert torch.equal(*outs)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 7, 30])
def test_shared_tiles_of_the_first_matrix(num_tokens: int, format_name: str) -> None:
    """The same bits again and again, in any order of arrival, each launch with the counters at zero."""
    layer = Layer(format_name, 2880, 352)
    x, topk = make_inputs(num_tokens, 2880)
    for width, by_expert, split_k_1 in ((64, False, 4), (128, True, 2), (64, True, 9)):
        plan = Plan(
            is_direct=True, block_m=8, block_n_1=width, block_n_2=64, by_expert=by_expert, split_k_1=split_k_1, pdl=True
        )
        info = replace(layer.info, plans=PlanTable(((64, plan), *layer.info.plans.steps[-1:])))
        out = layer.run(x, topk, info)
        assert layer.error(x, topk, out) < TOLERANCE
        assert all(torch.equal(out, layer.run(x, topk, info)) for _ in range(100))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer.run(x, topk, info)
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, out)
        assert not info.layer.arrived.any()


def test_expert_parallel_parts_sum_to_the_whole() -> None:
    layer = Layer("mxfp4", 384, 288)
    x, topk = make_inputs(33, 384)
    total = torch.zeros(33, 384, device="cuda")
    for rank in range(4):
        topology = Topology(device=torch.device("cuda"), ep_size=4, ep_rank=rank)
        own = topology.expert_range(E)
        part = ExpertWeights(
            w13=layer.experts.w13.narrow(0, own.start, 4), w2=layer.experts.w2.narrow(0, own.start, 4),
            b13=layer.experts.b13[own.start : own.stop], b2=layer.experts.b2[own.start : own.stop],
        )  # fmt: skip
        config = replace(layer.config, place=topology.place)
        info = TritonBackend().prepare(part, config, topology)
        result = MoeRunner(MoeBackend.TRITON, MoeA2ABackend.NONE, config).run(StandardDispatchOutput(x, topk), info)
        assert result.is_partial
        total += result.hidden_states.float()
    assert layer.error(x, topk, total) < TOLERANCE


def test_experts_without_biases_and_with_the_plain_activation() -> None:
    layer = Layer("nvfp4", 384, 256, Activation())
    layer.experts = replace(layer.experts, b13=None, b2=None)
    layer.info = TritonBackend().prepare(layer.experts, layer.config, Topology(device=torch.device("cuda")))
    x, topk = make_inputs(20, 384)
    assert layer.error(x, topk, layer.run(x, topk)) < TOLERANCE


@pytest.mark.parametrize(("hidden", "inter"), [(1024, 512), (2880, 1440)])
def test_fp8_activations(hidden: int, inter: int) -> None:
    layer = Layer("fp8_block", hidden, inter)
    plan = Plan(
        is_direct=False, block_m=64, block_n_1=128, block_n_2=128, num_stages_1=3, num_stages_2=3, fp8_activations=True
    )
    info = replace(layer.info, plans=PlanTable(((None, plan),)))
    for num_tokens in (3, 70, 600):
        x, topk = make_inputs(num_tokens, hidden)
        assert layer.error(x, topk, layer.run(x, topk, info)) < FP8_PLAN
