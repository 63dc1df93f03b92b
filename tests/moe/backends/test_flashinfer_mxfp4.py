"""MXFP4 on FlashInfer through the runner, against emulated kernels: numbers, shards, refusals and gates."""

import pytest
import torch

from moe import (
    Activation,
    BypassedTopK,
    MoeA2ABackend,
    MoeBackend,
    MoeRunner,
    MoeRunnerConfig,
    RankPlace,
    StandardDispatchOutput,
    StandardTopK,
    Topology,
)
from moe.backends.flashinfer.mxfp4 import FlashinferMxfp4Backend
from moe.config import RoutingConfig, RoutingMethod
from moe.formats import ExpertWeights
from moe.routing import route
from tests.emulators.cutlass import CutlassEmulator, install_cutlass
from tests.emulators.trtllm import TrtllmEmulator, install_trtllm
from tests.moe.backends import hostile
from tests.moe.configs import ALONE
from tests.tables import rows

GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
DEEPSEEK_V4 = Activation(limit=10.0)
BACKEND = FlashinferMxfp4Backend()
E, H, I, K, T = 8, 192, 288, 3, 23
EXACT = 1e-5  # weights only: the emulator computes in fp32 like the reference


def gpt_oss(num_experts: int = E, hidden: int = H, inter: int = I) -> ExpertWeights:
    return hostile.plain_experts("mxfp4", num_experts, hidden, inter, has_biases=True)


def deepseek_v4(hidden: int = 256, inter: int = 128) -> ExpertWeights:
    return hostile.plain_experts("mxfp4", E, hidden, inter)


def config_for(
    experts: ExpertWeights, activation: Activation, num_experts: int = E, place: RankPlace = ALONE
) -> MoeRunnerConfig:
    return hostile.make_config(
        num_experts, experts.hidden_size, experts.intermediate_size, K, activation=activation, place=place
    )


def run(
    experts: ExpertWeights,
    activation: Activation,
    x: torch.Tensor,
    topk: StandardTopK | BypassedTopK,
    topology: Topology,
    num_experts: int = E,
) -> tuple[torch.Tensor, bool]:
    config = config_for(experts, activation, num_experts, topology)
    info = BACKEND.prepare(experts, config, topology)
    runner = MoeRunner(MoeBackend.FLASHINFER_MXFP4, MoeA2ABackend.NONE, config)
    result = runner.run(StandardDispatchOutput(x, topk), info)
    return result.hidden_states, result.is_partial


@pytest.fixture
def sm90(monkeypatch: pytest.MonkeyPatch) -> CutlassEmulator:
    return install_cutlass(monkeypatch)


@pytest.fixture
def sm100(monkeypatch: pytest.MonkeyPatch) -> TrtllmEmulator:
    return install_trtllm(monkeypatch)


@pytest.fixture(params=["sm90", "sm100"])
def kernel(request: pytest.FixtureRequest) -> CutlassEmulator | TrtllmEmulator:
    return request.getfixturevalue(request.param)


def check_exact(emulator: CutlassEmulator | TrtllmEmulator, got: torch.Tensor, want: torch.Tensor) -> None:
    """fp32 inside the kernel, one rounding to bf16 outside, nothing else on the way."""
    assert hostile.relative_error(emulator.exact[:, : want.shape[1]], want) < EXACT
    assert torch.equal(got, emulator.exact[:, : want.shape[1]].bfloat16())
    assert got.dtype == torch.bfloat16
    assert got.is_contiguous()


@rows("activation", DEEPSEEK_V4, Activation())
def test_scalars_of_the_activation(kernel: CutlassEmulator | TrtllmEmulator, activation: Activation) -> None:
    experts, x, topk = deepseek_v4(), hostile.tokens(T, 256, size=9.0), hostile.routing(T, E, K)
    got, _ = run(experts, activation, x, topk, Topology())
    check_exact(kernel, got, hostile.reference(x, topk, experts, activation))
    call = kernel.calls[-1]
    if activation.is_plain:
        assert (call.alpha, call.beta, call.limit) == (None, None, None)
    else:
        assert [part.tolist() for part in (call.alpha, call.beta, call.limit)] == [[1.0] * E, [0.0] * E, [10.0] * E]


def test_bypassed_routing_is_materialised(kernel: CutlassEmulator | TrtllmEmulator) -> None:
    experts, x = gpt_oss(), hostile.tokens(T, H, size=6.0)
    rules = RoutingConfig(method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=E, top_k=K)
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(4))
    got, _ = run(experts, GPT_OSS, x, BypassedTopK(logits, rules), Topology())
    topk = route(logits, rules)
    if isinstance(kernel, TrtllmEmulator):  # packed weights are bf16
        topk = StandardTopK(topk.weights.bfloat16().float(), topk.ids)
    check_exact(kernel, got, hostile.reference(x, topk, experts, GPT_OSS))


@rows("arch, name", ("sm90", "cutlass_fused_moe"), ("sm100", "trtllm_fp4_block_scale_routed_moe"))
def test_tuning_bucket_is_a_power_of_two(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, arch: str, name: str
) -> None:
    request.getfixturevalue(arch)
    from flashinfer import fused_moe

    seen = []
    genuine = getattr(fused_moe, name)
    monkeypatch.setattr(fused_moe, name, lambda **kw: seen.append(kw) or genuine(**kw))
    x, topk = hostile.tokens(23, H, size=6.0), hostile.routing(23, E, K)
    run(gpt_oss(), GPT_OSS, x, topk, Topology())
    assert seen[0]["tune_max_num_tokens"] == 32
