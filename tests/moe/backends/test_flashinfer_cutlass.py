"""bf16, FP8 and NVFP4 through `cutlass_fused_moe` and the runner, against the emulated compiled module."""

import pytest
import torch

from moe import (
    Activation,
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
from moe.backends.flashinfer.cutlass import FlashinferCutlassBackend
from moe.device import Device
from moe.errors import WeightFormatError
from moe.formats import Bf16Weight, ExpertWeights
from tests.emulators.cutlass import CutlassEmulator, install_cutlass
from tests.moe.backends import hostile
from tests.moe.configs import ALONE

BACKEND = FlashinferCutlassBackend()
E, H, I, K, T = 8, 256, 256, 3, 23
FORMATS = ("bf16", "fp8_block", "fp8_tensor", "nvfp4")
TOLERANCE = {"bf16": 1e-5, "fp8_block": 1e-3, "fp8_tensor": 1e-3, "nvfp4": 1e-3}
PLAIN = Activation()
GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
X, TOPK = hostile.tokens(T, H, size=3.0), hostile.routing(T, E, K)


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> CutlassEmulator:
    return install_cutlass(monkeypatch, *((10, 0) if name == "nvfp4" else (9, 0)))


def config_for(experts: ExpertWeights, activation: Activation = PLAIN, place: RankPlace = ALONE) -> MoeRunnerConfig:
    return hostile.make_config(E, H, experts.intermediate_size, K, place=place, activation=activation)


def run(
    experts: ExpertWeights, topology: Topology, activation: Activation = PLAIN, topk: StandardTopK = TOPK
) -> torch.Tensor:
    config = config_for(experts, activation, topology)
    runner = MoeRunner(MoeBackend.FLASHINFER_CUTLASS, MoeA2ABackend.NONE, config)
    result = runner.run(StandardDispatchOutput(X, topk), BACKEND.prepare(experts, config, topology))
    assert result.is_partial == (topology.tp_size * topology.ep_size > 1)
    assert result.hidden_states.dtype == torch.bfloat16
    return result.hidden_states


def expected(experts: ExpertWeights, activation: Activation = PLAIN) -> torch.Tensor:
    return hostile.reference(X, TOPK, hostile.layer_wide(experts), activation)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    emulator = install(monkeypatch, name)
    experts = hostile.quantized_experts(name, E, H, I, x=X)
    got = run(experts, Topology())
    assert emulator.exact is not None
    assert hostile.relative_error(emulator.exact, expected(experts)) < TOLERANCE[name]
    assert torch.equal(got, emulator.exact.bfloat16())
    assert torch.equal(got[2], torch.zeros(H, dtype=torch.bfloat16)), "all ids of this token are -1"


@pytest.mark.parametrize("name", ["fp8_tensor", "nvfp4"])
def test_halves_with_their_own_scales_get_a_common_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    emulator = install(monkeypatch, name)
    experts = hostile.quantized_experts(name, E, H, I, x=X, per_half=True)
    run(experts, Topology())
    assert emulator.exact is not None
    assert hostile.relative_error(emulator.exact, expected(experts)) < TOLERANCE[name]


def test_bf16_with_biases_and_clamped_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = install(monkeypatch, "bf16")
    w13, w2 = hostile.dense_experts(E, H, I)
    b13, b2 = hostile.biases(E, H, I)
    experts = ExpertWeights(w13=Bf16Weight.quantize(w13 * 2), w2=Bf16Weight.quantize(w2), b13=b13, b2=b2)
    run(experts, Topology(), GPT_OSS)
    assert emulator.exact is not None
    assert hostile.relative_error(emulator.exact, expected(experts, GPT_OSS)) < 1e-5


def test_the_answer_comes_from_the_topologys_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "bf16")
    made = []

    def record(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(torch.full(shape, float("nan"), dtype=dtype, device=device))
        return made[-1]

    got = run(hostile.quantized_experts("bf16", E, H, I, x=X), Topology(allocator=record))
    assert len(made) == 1
    assert got.data_ptr() == made[0].data_ptr()


def test_tuning_bucket_is_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "bf16")
    from flashinfer import fused_moe

    seen, genuine = [], fused_moe.cutlass_fused_moe
    monkeypatch.setattr(fused_moe, "cutlass_fused_moe", lambda **kw: seen.append(kw) or genuine(**kw))
    run(hostile.quantized_experts("bf16", E, H, I, x=X), Topology())
    assert (T, seen[0]["tune_max_num_tokens"]) == (23, 32)


def test_tiny_block_scales_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = install(monkeypatch, "fp8_block")
    experts = hostile.quantized_experts("fp8_block", E, H, I, x=X)
    experts.w13.scale_inv[0] = 0.0
    run(experts, Topology())
    assert float(emulator.calls[0].scales[0].min()) >= 1e-10


@pytest.mark.parametrize("name", ["fp8_tensor", "nvfp4"])
def test_expert_parallelism_needs_the_layers_scales(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch, name)
    part = hostile.shard(hostile.quantized_experts(name, E, H, I, x=X), ep=(2, 1))
    with pytest.raises(WeightFormatError, match="layer_input_scales"):
        run(part, Topology(ep_size=2, ep_rank=1))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "bf16")
    small = hostile.tokens(2, 192)
    block = hostile.quantized_experts("fp8_block", E, 192, I, x=small)
    with pytest.raises(WeightFormatError, match="hidden_size of this rank is 192"):
        BACKEND.prepare(block, hostile.make_config(E, 192, I, K), Topology())
    block = hostile.quantized_experts("fp8_block", E, H, I, x=X)
    with pytest.raises(UnsupportedPathError, match="plain SwiGLU"):
        run(block, Topology(), GPT_OSS)
    b13, b2 = hostile.biases(E, H, I)
    with pytest.raises(WeightFormatError, match="biases"):
        run(ExpertWeights(w13=block.w13, w2=block.w2, b13=b13, b2=b2), Topology())
    with pytest.raises(UnsupportedPathError, match="nvfp4 on sm90 is not supported; it runs on sm100, sm103"):
        run(hostile.quantized_experts("nvfp4", E, H, I, x=X), Topology())
    runner = MoeRunner(MoeBackend.FLASHINFER_CUTLASS, MoeA2ABackend.NONE, config_for(block))
    with pytest.raises(MoeConfigError, match="cannot run a object"):
        runner.run(StandardDispatchOutput(X, TOPK), object())


def test_supports() -> None:
    config, none = hostile.make_config(E, H, I), MoeA2ABackend.NONE
    usable = {
        (arch, name)
        for arch in ("sm80", "sm89", "sm90", "sm100", "sm103", "gfx942", "cpu")
        for name in (*FORMATS, "mxfp4")
        if BACKEND.supports(Device(arch=arch), name, none, config) is None
    }
    assert usable == {("sm90", "bf16"), ("sm90", "fp8_block"), ("sm90", "fp8_tensor")} | {
        (arch, name) for arch in ("sm100", "sm103") for name in ("bf16", "fp8_tensor", "nvfp4")
    }
    assert "deepep" in str(BACKEND.supports(Device(arch="sm90"), "bf16", MoeA2ABackend.DEEPEP, config))
    clamped = hostile.make_config(E, H, I, activation=GPT_OSS)
    assert "plain SwiGLU" in str(BACKEND.supports(Device(arch="sm90"), "fp8_block", none, clamped))
    assert BACKEND.supports(Device(arch="sm90"), "bf16", none, clamped) is None
