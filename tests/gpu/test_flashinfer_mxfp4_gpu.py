"""MXFP4, bf16 and FP8 experts on the real SM90 kernels of FlashInfer, against the twin. Needs a Hopper GPU."""

import functools

import pytest
import torch

from moe import (
    Activation,
    MoeA2ABackend,
    MoeBackend,
    MoeRunner,
    MoeRunnerConfig,
    StandardDispatchOutput,
    StandardTopK,
    Topology,
)
from moe.formats import Bf16Weight, ExpertWeights, Fp8BlockWeight, Mxfp4Weight, Weight, activation_quant, stack
from moe.registry import load_backend
from moe.selfcheck import check_layer
from moe.twin import moe_twin

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
DEEPSEEK_V4 = Activation(limit=10.0)
TOKENS = (0, 1, 2, 3, 7, 64, 257, 4096)
TOP_K, FACTOR = 4, 2.5
WEIGHT_ONLY = 0.005  # bf16 activations and results


def weights(kind: type[Weight], num_experts: int, rows: int, cols: int, seed: int) -> Weight:
    """Random experts, each with a magnitude of its own, quantized one at a time."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    return stack(
        [
            kind.quantize(torch.randn(rows, cols, device=DEVICE, generator=g) * (1 + 0.02 * expert) / cols**0.5)  # type: ignore[attr-defined]
            for expert in range(num_experts)
        ]
    )


@functools.lru_cache(maxsize=1)
def experts_of(kind: type[Weight], num_experts: int, hidden: int, inter: int, has_bias: bool) -> ExpertWeights:
    """One layer; only the last one asked for is kept."""
    g = torch.Generator(DEVICE).manual_seed(3)
    b13 = b2 = None
    if has_bias:
        b13 = torch.randn(num_experts, 2 * inter, device=DEVICE, generator=g).bfloat16()
        b2 = torch.randn(num_experts, hidden, device=DEVICE, generator=g).bfloat16()
    return ExpertWeights(
        w13=weights(kind, num_experts, 2 * inter, hidden, 1), w2=weights(kind, num_experts, hidden, inter, 2),
        b13=b13, b2=b2,
    )  # fmt: skip


def tokens_and_routing(num_tokens: int, hidden: int, num_experts: int) -> tuple[torch.Tensor, StandardTopK]:
    """bf16 tokens large enough for clamps; one expert idle; some ids -1."""
    g = torch.Generator(DEVICE).manual_seed(4)
    x = (torch.randn(num_tokens, hidden, device=DEVICE, generator=g) * 5).bfloat16()
    scores = torch.rand(num_tokens, num_experts, device=DEVICE, generator=g)
    scores[:, 1] = -1
    ids = scores.topk(TOP_K, dim=-1).indices.int()
    ids[num_tokens // 2 :, 0] = -1
    chosen = torch.randn(num_tokens, TOP_K, device=DEVICE, generator=g)
    return x, StandardTopK(torch.softmax(chosen, dim=-1) * FACTOR, ids)


def local(experts: ExpertWeights, start: int, count: int) -> ExpertWeights:
    return ExpertWeights(
        w13=experts.w13.narrow(0, start, count),
        w2=experts.w2.narrow(0, start, count),
        b13=None if experts.b13 is None else experts.b13[start : start + count],
        b2=None if experts.b2 is None else experts.b2[start : start + count],
    )


def make_runner(
    backend: MoeBackend, experts: ExpertWeights, activation: Activation, num_experts: int
) -> tuple[MoeRunner, MoeRunnerConfig]:
    config = MoeRunnerConfig(
        num_experts=num_experts, num_local_experts=experts.num_experts, hidden_size=experts.hidden_size,
        intermediate_size=experts.intermediate_size, top_k=TOP_K, activation=activation,
    )  # fmt: skip
    return MoeRunner(backend, MoeA2ABackend.NONE, config), config


def worst_error(backend: MoeBackend, experts: ExpertWeights, activation: Activation, ep_size: int = 1) -> float:
    """Largest relative error over all token counts, ranks summed in fp32."""
    num_local = experts.num_experts // ep_size
    ranks = []
    for rank in range(ep_size):
        topology = Topology(device=DEVICE, ep_size=ep_size, ep_rank=rank)
        part = local(experts, rank * num_local, num_local)
        runner, config = make_runner(backend, part, activation, experts.num_experts)
        ranks.append((runner, load_backend(backend).prepare(part, config, topology)))
    errors = []
    for num_tokens in TOKENS:
        x, topk = tokens_and_routing(num_tokens, experts.hidden_size, experts.num_experts)
        parts = [runner.run(StandardDispatchOutput(x, topk), info).hidden_states for runner, info in ranks]
        got = torch.stack(parts).float().sum(0)
        assert got.shape == x.shape
        if num_tokens:
            quantize = activation_quant.fp8_groups if experts.format_name == "fp8_block" else None
            want = moe_twin(x, topk, experts, activation, quantize_input=quantize)
            errors.append(float((got - want).norm() / want.norm()))
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


@pytest.mark.parametrize("inter", [1440, 736, 672, 384, 192, 0])
def test_gpt_oss_tensor_parallel_shares(inter: int) -> None:
    """A rank's share of 2880 at tp 2, 4 and 8, and a rank that owns nothing."""
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


@pytest.mark.parametrize("ep_size", [1, 2])
def test_bf16(ep_size: int) -> None:
    experts = experts_of(Bf16Weight, 16, 2880, 2880, False)
    assert worst_error(MoeBackend.FLASHINFER_CUTLASS, experts, Activation(), ep_size) < WEIGHT_ONLY


def test_bf16_with_biases_and_clamped_activation() -> None:
    experts = experts_of(Bf16Weight, 16, 2880, 2880, True)
    assert worst_error(MoeBackend.FLASHINFER_CUTLASS, experts, GPT_OSS) < WEIGHT_ONLY


@pytest.mark.parametrize("ep_size", [1, 2])
def test_fp8_block(ep_size: int) -> None:
    experts = experts_of(Fp8BlockWeight, 8, 7168, 2048, False)
    backend = load_backend(MoeBackend.FLASHINFER_CUTLASS)
    _, config = make_runner(MoeBackend.FLASHINFER_CUTLASS, experts, Activation(), 8)
    error = worst_error(MoeBackend.FLASHINFER_CUTLASS, experts, Activation(), ep_size)
    assert error < backend.tolerance_for("fp8_block", config)


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
