"""MXFP4 on FlashInfer through the runner, against emulated kernels: numbers, shards, refusals and gates."""

import importlib.metadata

import pytest
import torch

from moe import (
    Activation,
    BypassedTopK,
    MoeA2ABackend,
    MoeBackend,
    MoeConfigError,
    MoeRunner,
    MoeRunnerConfig,
    RankPlace,
    StandardDispatchOutput,
    StandardTopK,
    Topology,
    UnsupportedPathError,
)
from moe.backends.flashinfer.mxfp4 import FlashinferMxfp4Backend, FlashinferMxfp4Sm90QuantInfo
from moe.config import RoutingConfig, RoutingMethod
from moe.device import Device
from moe.errors import WeightFormatError
from moe.formats import Bf16Weight, ExpertWeights, Mxfp4Weight
from moe.routing import route
from tests.emulators.cutlass import CutlassEmulator, install_cutlass
from tests.emulators.trtllm import TrtllmEmulator, install_trtllm
from tests.moe.backends import hostile
from tests.moe.configs import ALONE

GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
DEEPSEEK_V4 = Activation(limit=10.0)
BACKEND = FlashinferMxfp4Backend()
E, H, I, K, T = 8, 192, 288, 3, 23
EXACT = 1e-5  # weights only: the emulator computes in fp32 like the reference


def gpt_oss(num_experts: int = E, hidden: int = H, inter: int = I) -> ExpertWeights:
    w13, w2 = hostile.dense_experts(num_experts, hidden, inter)
    b13, b2 = hostile.biases(num_experts, hidden, inter)
    return ExpertWeights(w13=Mxfp4Weight.quantize(w13), w2=Mxfp4Weight.quantize(w2), b13=b13, b2=b2)


def deepseek_v4(hidden: int = 256, inter: int = 128) -> ExpertWeights:
    w13, w2 = hostile.dense_experts(E, hidden, inter)
    return ExpertWeights(w13=Mxfp4Weight.quantize(w13), w2=Mxfp4Weight.quantize(w2))


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
    assert emulator.exact is not None
    assert hostile.relative_error(emulator.exact[:, : want.shape[1]], want) < EXACT
    assert torch.equal(got, emulator.exact[:, : want.shape[1]].bfloat16())
    assert got.dtype == torch.bfloat16
    assert got.is_contiguous()


def test_gpt_oss_experts_are_padded_and_exact(kernel: CutlassEmulator | TrtllmEmulator) -> None:
    experts, x, topk = gpt_oss(), hostile.tokens(T, H, size=6.0), hostile.routing(T, E, K)
    got, is_partial = run(experts, GPT_OSS, x, topk, Topology())
    check_exact(kernel, got, hostile.reference(x, topk, experts, GPT_OSS))
    assert not is_partial
    assert torch.equal(got[2], torch.zeros(H, dtype=torch.bfloat16)), "all ids of this token are -1"


@pytest.mark.parametrize("activation", [DEEPSEEK_V4, Activation()])
def test_experts_without_biases(kernel: CutlassEmulator | TrtllmEmulator, activation: Activation) -> None:
    experts, x, topk = deepseek_v4(), hostile.tokens(T, 256, size=9.0), hostile.routing(T, E, K)
    got, _ = run(experts, activation, x, topk, Topology())
    check_exact(kernel, got, hostile.reference(x, topk, experts, activation))
    call = kernel.calls[-1]
    scalars = [call.alpha, call.beta, call.limit]
    if activation.is_plain:
        assert scalars == [None, None, None]
    else:
        assert [scalar.tolist() for scalar in scalars] == [[1.0] * E, [0.0] * E, [10.0] * E]


@pytest.mark.parametrize(("tp_size", "ep_size"), [(2, 1), (1, 8), (2, 4)])
def test_ranks_without_biases_sum_to_one(kernel: CutlassEmulator | TrtllmEmulator, tp_size: int, ep_size: int) -> None:
    experts, x, topk = deepseek_v4(inter=256), hostile.tokens(T, 256, size=9.0), hostile.routing(T, E, K)
    total = torch.zeros(T, 256)
    for tp_rank in range(tp_size):
        for ep_rank in range(ep_size):
            part = hostile.shard(experts, tp=(tp_size, tp_rank), ep=(ep_size, ep_rank), block=128)
            topology = Topology(tp_size=tp_size, tp_rank=tp_rank, ep_size=ep_size, ep_rank=ep_rank)
            run(part, DEEPSEEK_V4, x, topk, topology)
            assert kernel.exact is not None
            total += kernel.exact
    assert hostile.relative_error(total, hostile.reference(x, topk, experts, DEEPSEEK_V4)) < EXACT


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 64])
def test_token_counts(sm90: CutlassEmulator, num_tokens: int) -> None:
    experts, x, topk = gpt_oss(), hostile.tokens(num_tokens, H, size=6.0), hostile.routing(num_tokens, E, K)
    got, _ = run(experts, GPT_OSS, x, topk, Topology())
    assert got.shape == (num_tokens, H)
    assert len(sm90.calls) == (num_tokens > 0)
    if num_tokens:
        check_exact(sm90, got, hostile.reference(x, topk, experts, GPT_OSS))


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("inter", [288, 2880])
def test_tensor_slices_by_block_sum_to_one_rank(
    kernel: CutlassEmulator | TrtllmEmulator, tp_size: int, inter: int
) -> None:
    num_experts = E if inter == 288 else 4
    experts = gpt_oss(num_experts, 64, inter)
    x, topk = hostile.tokens(9, 64, size=6.0), hostile.routing(9, num_experts, K)
    total, sizes = torch.zeros(9, 64), []
    for rank in range(tp_size):
        local = hostile.shard(experts, tp=(tp_size, rank))
        sizes.append(local.intermediate_size)
        run(local, GPT_OSS, x, topk, Topology(tp_size=tp_size, tp_rank=rank), num_experts)
        assert kernel.exact is not None
        total += kernel.exact[:, :64]
    assert sum(sizes) == inter
    if (inter, tp_size) == (288, 8):
        assert sizes.count(0) == 3
    if (inter, tp_size) == (2880, 4):
        assert sizes == [736, 736, 736, 672]
    assert hostile.relative_error(total, hostile.reference(x, topk, experts, GPT_OSS)) < EXACT


def test_bypassed_routing_is_materialised(kernel: CutlassEmulator | TrtllmEmulator) -> None:
    experts, x = gpt_oss(), hostile.tokens(T, H, size=6.0)
    rules = RoutingConfig(method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=E, top_k=K)
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(4))
    got, _ = run(experts, GPT_OSS, x, BypassedTopK(logits, rules), Topology())
    topk = route(logits, rules)
    if isinstance(kernel, TrtllmEmulator):  # packed weights are bf16
        topk = StandardTopK(topk.weights.bfloat16().float(), topk.ids)
    check_exact(kernel, got, hostile.reference(x, topk, experts, GPT_OSS))


def test_the_answer_comes_from_the_topologys_allocator(kernel: CutlassEmulator | TrtllmEmulator) -> None:
    made = []

    def record(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(torch.full(shape, float("nan"), dtype=dtype, device=device))
        return made[-1]

    topk = hostile.routing(T, E, K)
    for experts, hidden, activation in ((gpt_oss(), H, GPT_OSS), (deepseek_v4(), 256, DEEPSEEK_V4)):
        x = hostile.tokens(T, hidden, size=9.0)
        got, _ = run(experts, activation, x, topk, Topology(allocator=record))
        assert got.data_ptr() == made[-1].data_ptr()
        assert bool(got.isfinite().all())
    assert [tuple(tensor.shape) for tensor in made] == [(T, H), (T, 256)]


@pytest.mark.parametrize(
    ("arch", "name"), [("sm90", "cutlass_fused_moe"), ("sm100", "trtllm_fp4_block_scale_routed_moe")]
)
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


@pytest.mark.parametrize(("hidden", "inter"), [(256, 96), (192, 128)])
def test_sizes_that_do_not_fit_the_tiles_are_refused_without_biases(
    sm90: CutlassEmulator, hidden: int, inter: int
) -> None:
    del sm90
    experts = deepseek_v4(hidden, inter)
    with pytest.raises(WeightFormatError, match="multiple of 128"):
        BACKEND.prepare(experts, config_for(experts, DEEPSEEK_V4), Topology())


def test_other_formats_and_other_infos_are_refused(sm90: CutlassEmulator) -> None:
    del sm90
    dense = ExpertWeights(w13=Bf16Weight(torch.zeros(E, 256, 128)), w2=Bf16Weight(torch.zeros(E, 128, 128)))
    config = config_for(dense, Activation())
    with pytest.raises(WeightFormatError, match="takes mxfp4"):
        BACKEND.prepare(dense, config, Topology())
    runner = MoeRunner(MoeBackend.FLASHINFER_MXFP4, MoeA2ABackend.NONE, config)
    with pytest.raises(MoeConfigError, match="cannot run a int"):
        runner.run(StandardDispatchOutput(torch.zeros(1, 128), hostile.routing(1, E, K)), 7)


def test_overlap_is_refused(sm90: CutlassEmulator) -> None:
    del sm90
    experts = deepseek_v4()
    config = config_for(experts, DEEPSEEK_V4)
    runner = MoeRunner(MoeBackend.FLASHINFER_MXFP4, MoeA2ABackend.NONE, config)
    runner.set_overlap_args("stream")
    with pytest.raises(MoeConfigError, match="cannot overlap"):
        runner.run(
            StandardDispatchOutput(hostile.tokens(1, 256), hostile.routing(1, E, K)),
            BACKEND.prepare(experts, config, Topology()),
        )


@pytest.mark.parametrize("installed", [None, "0.6.10", "0.6.11rc1", "0.7.2.post1"])
def test_version_gate(sm90: CutlassEmulator, monkeypatch: pytest.MonkeyPatch, installed: str | None) -> None:
    del sm90

    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    experts = gpt_oss()
    config = config_for(experts, GPT_OSS)
    if installed in (None, "0.6.10"):
        wanted = "pip install flashinfer-python" if installed is None else r"0\.6\.11 or newer and found 0\.6\.10"
        with pytest.raises(UnsupportedPathError, match=wanted):
            BACKEND.prepare(experts, config, Topology())
    else:
        assert isinstance(BACKEND.prepare(experts, config, Topology()), FlashinferMxfp4Sm90QuantInfo)


def test_supports_answers_without_a_device() -> None:
    config = hostile.make_config(E, H, I, has_biases=True)
    none = MoeA2ABackend.NONE
    for arch in ("sm90", "sm100", "sm103"):
        assert BACKEND.supports(Device(arch=arch), "mxfp4", none, config) is None
    reasons = {
        "sm80": BACKEND.supports(Device(arch="sm80"), "mxfp4", none, config),
        "fp8_block": BACKEND.supports(Device(arch="sm90"), "fp8_block", none, config),
        "deepep": BACKEND.supports(Device(arch="sm90"), "mxfp4", MoeA2ABackend.DEEPEP, config),
        "float32": BACKEND.supports(
            Device(arch="sm90"), "mxfp4", none, hostile.make_config(E, H, I, dtype=torch.float32, has_biases=True)
        ),
        "no_combine": BACKEND.supports(
            Device(arch="sm90"), "mxfp4", none, hostile.make_config(E, H, I, no_combine=True, has_biases=True)
        ),
        "multiple of 128": BACKEND.supports(Device(arch="sm90"), "mxfp4", none, hostile.make_config(E, H, I)),
    }
    for word, reason in reasons.items():
        assert word in str(reason)


def test_an_unknown_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install_cutlass(monkeypatch, 8, 9)
    with pytest.raises(UnsupportedPathError, match="sm89"):
        BACKEND.prepare(gpt_oss(), config_for(gpt_oss(), GPT_OSS), Topology())
