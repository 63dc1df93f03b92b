"""MXFP4, bf16 and FP8 experts on the real SM90 kernels of FlashInfer, against the twin. Needs a Hopper GPU."""

import pytest
import torch

from moe import Activation, MoeBackend, StandardDispatchOutput, Topology
from moe.check.reference import reference_moe
from moe.check.selfcheck import check_layer
from moe.formats import Bf16Weight, ExpertWeights, Fp8BlockWeight, Mxfp4Weight, Weight, activation_quant
from moe.registry import load_backend
from tests.gpu.common import (
    DEEPSEEK_V4,
    DEVICE,
    GPT_OSS,
    TOKENS,
    WEIGHT_ONLY,
    experts_of,
    make_runner,
    own_part,
    relative_error,
    tokens_and_routing,
)

pytestmark = pytest.mark.gpu


def worst_error(backend: MoeBackend, experts: ExpertWeights, activation: Activation, ep_size: int = 1) -> float:
    """Largest relative error over all token counts, ranks summed in fp32."""
    ranks = []
    for rank in range(ep_size):
        part, topology = own_part(experts, ep_size, rank)
        runner, config = make_runner(backend, part, activation, experts.num_experts, topology.place)
        ranks.append((runner, load_backend(backend).prepare(part, config, topology)))
    errors = []
    for num_tokens in TOKENS:
        x, topk = tokens_and_routing(num_tokens, experts.hidden_size, experts.num_experts)
        parts = [runner.run(StandardDispatchOutput(x, topk), info).hidden_states for runner, info in ranks]
        got = torch.stack(parts).float().sum(0)
        assert got.shape == x.shape
        if num_tokens:
            quantize = activation_quant.fp8_groups if experts.format_name == "fp8_block" else None
            want = reference_moe(x, topk, experts, activation, quantize_input=quantize)
            errors.append(relative_error(got, want))
    return max(errors)


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_gpt_oss_shapes(ep_size: int) -> None:
    experts = experts_of(Mxfp4Weight, 32, 2880, 2880, True)
    assert worst_error(MoeBackend.FLASHINFER_MXFP4, experts, GPT_OSS, ep_size) < WEIGHT_ONLY


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("activation", [DEEPSEEK_V4, Activation()], ids=["clamped", "plain"])
def test_deepseek_v4_shapes(ep_size: int, activation: Activation) -> None:
    experts = experts_of(Mxfp4Weight, 16, 4096, 2048, False)
    assert worst_error(MoeBackend.FLASHINFER_MXFP4, experts, activation, ep_size) < WEIGHT_ONLY


@pytest.mark.parametrize("inter", [1440, 736, 672, 384, 192])
def test_gpt_oss_tensor_parallel_shares(inter: int) -> None:
    """A rank's share of 2880 at tp 2, 4 and 8."""
    experts = experts_of(Mxfp4Weight, 8, 2880, 2880, True)
    assert experts.b13 is not None
    gate, up = (experts.w13.narrow(1, start, inter) for start in (0, 2880))
    share = ExpertWeights(
        w13=Mxfp4Weight(torch.cat((gate.codes, up.codes), 1), torch.cat((gate.scales, up.scales), 1)),  # type: ignore[attr-defined]
        w2=experts.w2.narrow(2, 0, inter),
        b13=torch.cat((experts.b13[:, :inter], experts.b13[:, 2880 : 2880 + inter]), 1),
        b2=experts.b2,
    )
    assert worst_error(MoeBackend.FLASHINFER_MXFP4, share, GPT_OSS) < WEIGHT_ONLY


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_bf16(ep_size: int) -> None:
    experts = experts_of(Bf16Weight, 16, 2880, 2880, False)
    assert worst_error(MoeBackend.FLASHINFER_CUTLASS, experts, Activation(), ep_size) < WEIGHT_ONLY


def test_bf16_with_biases_and_clamped_activation() -> None:
    experts = experts_of(Bf16Weight, 16, 2880, 2880, True)
    assert worst_error(MoeBackend.FLASHINFER_CUTLASS, experts, GPT_OSS) < WEIGHT_ONLY


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_fp8_block(ep_size: int) -> None:
    experts = experts_of(Fp8BlockWeight, 8, 7168, 2048, False)
    backend = load_backend(MoeBackend.FLASHINFER_CUTLASS)
    error = worst_error(MoeBackend.FLASHINFER_CUTLASS, experts, Activation(), ep_size)
    assert error < backend.formats["fp8_block"].tolerance


GRAPH_CASES = [
    (Mxfp4Weight, MoeBackend.FLASHINFER_MXFP4, GPT_OSS, 8, 2880, 2880),
    (Mxfp4Weight, MoeBackend.FLASHINFER_MXFP4, DEEPSEEK_V4, 8, 4096, 2048),
    (Bf16Weight, MoeBackend.FLASHINFER_CUTLASS, Activation(), 8, 2880, 2880),
    (Fp8BlockWeight, MoeBackend.FLASHINFER_CUTLASS, Activation(), 8, 7168, 2048),
]


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize(("kind", "backend", "activation", "num_experts", "hidden", "inter"), GRAPH_CASES)
def test_equal_inside_a_graph_and_outside(
    kind: type[Weight], backend: MoeBackend, activation: Activation, num_experts: int, hidden: int, inter: int,
    ep_size: int,
) -> None:  # fmt: skip
    """Bit for bit; but FlashInfer's bf16 kernel may add a token's experts with atomics, in the order they come."""
    experts = experts_of(kind, num_experts, hidden, inter, activation is GPT_OSS)
    part, topology = own_part(experts, ep_size, ep_size - 1)
    runner, config = make_runner(backend, part, activation, num_experts, topology.place)
    info = load_backend(backend).prepare(part, config, topology)
    for num_tokens in TOKENS[1:]:
        x, topk = tokens_and_routing(num_tokens, hidden, num_experts)
        dispatched = StandardDispatchOutput(x, topk)
        outside = runner.run(dispatched, info).hidden_states  # compiles, tunes and allocates what it has to
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = runner.run(dispatched, info).hidden_states
        for _ in range(2):
            inside.fill_(float("nan"))
            graph.replay()
            if kind is Bf16Weight:
                assert relative_error(inside, outside) < WEIGHT_ONLY, num_tokens
            else:
                assert torch.equal(inside, outside), num_tokens


@pytest.mark.parametrize(
    ("kind", "backend", "activation", "hidden", "inter"),
    [
        (Mxfp4Weight, MoeBackend.FLASHINFER_MXFP4, GPT_OSS, 2880, 2880),
        (Bf16Weight, MoeBackend.FLASHINFER_CUTLASS, Activation(), 2048, 1024),
        (Fp8BlockWeight, MoeBackend.FLASHINFER_CUTLASS, Activation(), 2048, 1024),
    ],
)
def test_self_check_passes(
    kind: type[Weight], backend: MoeBackend, activation: Activation, hidden: int, inter: int
) -> None:
    experts = experts_of(kind, 8, hidden, inter, activation is GPT_OSS)
    runner, config = make_runner(backend, experts, activation, 8)
    topology = Topology(device=DEVICE)
    info = load_backend(backend).prepare(experts, config, topology)
    report = check_layer(runner, info, experts, layer=0, topology=topology)
    assert report.worst_error <= report.tolerance
