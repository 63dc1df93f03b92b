"""bf16, FP8 and NVFP4 through `cutlass_fused_moe` and the runner, against the emulated compiled module."""

import pytest
import torch

from moe import (
    Activation,
    MoeA2ABackend,
    MoeBackend,
    MoeRunner,
    MoeRunnerConfig,
    RankPlace,
    StandardDispatchOutput,
    StandardTopK,
    Topology,
)
from moe.backends.flashinfer.cutlass import FlashinferCutlassBackend
from moe.device import Device
from moe.formats import ExpertWeights
from tests.emulators.cutlass import CutlassEmulator, install_cutlass
from tests.moe.backends import hostile
from tests.moe.configs import ALONE
from tests.tables import rows

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


@rows("name", "fp8_tensor", "nvfp4")
def test_halves_with_their_own_scales_get_a_common_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    emulator = install(monkeypatch, name)
    experts = hostile.quantized_experts(name, E, H, I, x=X, per_half=True)
    run(experts, Topology())
    assert emulator.exact is not None
    assert hostile.relative_error(emulator.exact, expected(experts)) < TOLERANCE[name]


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


def test_supports() -> None:
    config = hostile.make_config(E, H, I)
    usable = {
        (arch, name)
        for arch in ("sm80", "sm89", "sm90", "sm100", "sm103", "gfx942", "cpu")
        for name in (*FORMATS, "mxfp4")
        if BACKEND.supports(Device(arch=arch), name, MoeA2ABackend.NONE, config) is None
    }
    assert usable == {("sm90", "bf16"), ("sm90", "fp8_block"), ("sm90", "fp8_tensor")} | {
        (arch, name) for arch in ("sm100", "sm103") for name in ("bf16", "fp8_tensor", "nvfp4")
    }
