"""What FlashInfer's kernels are called with, and their own routing: `cutlass_fused_moe`, MXFP4 and the TRT-LLM kernels
through the runner, against emulated compiled modules.
"""

import dataclasses
from typing import Any

import pytest
import torch

from moe import Activation, BypassedTopK, MoeRunner, RoutingConfig, RoutingMethod, Topology
from moe.backends.flashinfer import common
from moe.backends.flashinfer.trtllm import forced_logits_dtype
from moe.check.selfcheck import check_layer
from moe.device import Device
from moe.errors import SelfCheckError, UnsupportedPathError
from moe.registry import load_backend
from moe.routing import TopKOutput
from tests.emulators.trtllm import TrtllmEmulator
from tests.moe.backends import contract, hostile
from tests.moe.backends.contract import CUTEDSL, CUTLASS, GROUPED, MXFP4, NONE, SOFTMAX, TOPK, TRTLLM, E, Path, path_of
from tests.moe.moe_layers import DEEPSEEK_V4, PLAIN
from tests.tables import rows

SIGMOID_GROUPED, SOFTMAX_AFTER_TOPK = RoutingMethod.SIGMOID_GROUPED, RoutingMethod.SOFTMAX_AFTER_TOPK
TRTLLM_PATHS = tuple(path for path in contract.PATHS if path.backend is TRTLLM)
FP8_BLOCK = TRTLLM_PATHS[0]


def run(path: Path, topk: TopKOutput = TOPK) -> torch.Tensor:
    """One rank's answer for the contract's tokens; the layer's settings have the rules of its routing."""
    rules = topk.config if isinstance(topk, BypassedTopK) else None
    run_layer = contract.prepare(path, contract.make_experts(path), Topology(), rules)
    return run_layer(contract.tokens(path), topk).hidden_states


@pytest.fixture
def trtllm(monkeypatch: pytest.MonkeyPatch) -> TrtllmEmulator:
    return contract.install(monkeypatch, TRTLLM, "sm100")


# ---- arguments ----


@rows(
    "path, name",
    (path_of(CUTLASS), "cutlass_fused_moe"),
    (path_of(MXFP4, arch="sm90"), "cutlass_fused_moe"),
    (path_of(MXFP4, arch="sm100"), "trtllm_fp4_block_scale_routed_moe"),
    (FP8_BLOCK, "trtllm_fp8_block_scale_moe"),
)
def test_tuning_bucket_is_a_power_of_two(monkeypatch: pytest.MonkeyPatch, path: Path, name: str) -> None:
    contract.install(monkeypatch, path.backend, path.arch)
    from flashinfer import fused_moe

    seen, genuine = [], getattr(fused_moe, name)

    def record(output: torch.Tensor, **arguments: object) -> object:
        seen.append(arguments)
        return genuine(output=output, **arguments)

    monkeypatch.setattr(fused_moe, name, record)
    run(path, contract.bypassed(SOFTMAX) if path.backend is TRTLLM else TOPK)
    assert (contract.T, seen[0]["tune_max_num_tokens"]) == (23, 32)


@rows(
    "path",
    *(path_of(CUTLASS, format_name=name) for name in ("fp8_tensor", "nvfp4")),
    *(path_of(TRTLLM, format_name=name) for name in ("fp8_tensor", "nvfp4")),
    path_of(CUTEDSL),
)
def test_halves_with_their_own_scales_get_a_common_one(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    emulator = contract.install(monkeypatch, path.backend, path.arch)
    x = contract.tokens(path)
    experts = hostile.quantized_experts(path.format_name, E, 256, 256, x=x, per_half=True)
    contract.prepare(path, experts, Topology())(x, TOPK)
    assert hostile.relative_error(emulator.exact, contract.expected(path, x, TOPK, experts)) < path.tolerance


def test_tiny_block_scales_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    path = path_of(CUTLASS, format_name="fp8_block")
    emulator = contract.install(monkeypatch, CUTLASS, "sm90")
    experts = hostile.plain_experts("fp8_block", E, 256, 256)
    experts.w13.scale_inv[0] = 0.0
    contract.prepare(path, experts, Topology())(contract.tokens(path), TOPK)
    assert float(emulator.calls[0].scales[0].min()) >= 1e-10


def test_what_cutlass_supports() -> None:
    config = hostile.make_config(E, 256, 256)
    usable = {
        (arch, name)
        for arch in ("sm80", "sm89", "sm90", "sm100", "sm103", "gfx942", "cpu")
        for name in ("bf16", "fp8_block", "fp8_tensor", "nvfp4", "mxfp4")
        if load_backend(CUTLASS).supports(Device(arch=arch), name, NONE, config) is None
    }
    assert usable == {("sm90", "bf16"), ("sm90", "fp8_block"), ("sm90", "fp8_tensor")} | {
        (arch, name) for arch in ("sm100", "sm103") for name in ("bf16", "fp8_tensor", "nvfp4")
    }


@rows("arch", "sm90", "sm100")
@rows("activation", DEEPSEEK_V4, PLAIN)
def test_scalars_of_the_activation(monkeypatch: pytest.MonkeyPatch, arch: str, activation: Activation) -> None:
    emulator = contract.install(monkeypatch, MXFP4, arch)
    path = dataclasses.replace(path_of(MXFP4, arch=arch, has_biases=False), activation=activation)
    run(path)
    assert hostile.relative_error(emulator.exact, contract.expected_once(path)) < path.tolerance
    call = emulator.calls[-1]
    if activation.is_plain:
        assert (call.alpha, call.beta, call.limit) == (None, None, None)
    else:
        assert [part.tolist() for part in (call.alpha, call.beta, call.limit)] == [[1.0] * E, [0.0] * E, [10.0] * E]


# ---- routing ----


@rows("path", path_of(MXFP4, arch="sm90"), path_of(MXFP4, arch="sm100"))
def test_bypassed_routing_is_materialised(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    emulator = contract.install(monkeypatch, path.backend, path.arch)
    topk = contract.bypassed(SOFTMAX)
    got = run(path, topk)
    # only packed weights are bf16
    routed = topk.to_standard() if path.arch == "sm90" else contract.routed(topk)
    want = contract.expected(path, contract.tokens(path), routed, contract.make_experts(path))
    unrounded = emulator.exact[:, : path.hidden]
    assert hostile.relative_error(unrounded, want) < path.tolerance
    assert torch.equal(got, unrounded.bfloat16())


@rows("path", *TRTLLM_PATHS)
@rows("rules", GROUPED, SOFTMAX)
def test_numbers_with_routing_inside(trtllm: TrtllmEmulator, path: Path, rules: RoutingConfig) -> None:
    topk = contract.bypassed(rules)
    got, want = run(path, topk), contract.expected_once(path, topk)
    assert torch.equal(trtllm.routed[0].sort(-1).values.int(), contract.routed(topk).ids.sort(-1).values)
    assert hostile.relative_error(trtllm.exact, want) < path.tolerance
    assert torch.equal(got, trtllm.exact.bfloat16())
    total = contract.sum_of_ranks(path, trtllm, contract.tokens(path), topk, 2, 2)
    assert hostile.relative_error(total, want) < path.tolerance


@rows("path", *TRTLLM_PATHS)
@rows("asked", None, torch.float32, torch.bfloat16)
def test_dtype_of_logits_that_reaches_the_kernel(trtllm: TrtllmEmulator, path: Path, asked: torch.dtype | None) -> None:
    is_tensor = path.format_name == "fp8_tensor"
    run(path, contract.bypassed(GROUPED, asked or load_backend(TRTLLM).router_logits_dtype(path.format_name)))
    call = trtllm.calls[-1]
    assert call.logits.dtype == (torch.bfloat16 if is_tensor or asked is None else asked)
    assert call.routing_bias.dtype == (torch.bfloat16 if is_tensor else torch.float32)


def test_which_logits_older_releases_force(trtllm: TrtllmEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, grouped in (((0, 6, 7), torch.float32), ((0, 6, 8), None), ((0, 7, 2), None)):
        assert forced_logits_dtype("fp8_block", GROUPED, version) == grouped
        assert forced_logits_dtype("nvfp4", SOFTMAX, version) is None
        assert forced_logits_dtype("fp8_tensor", GROUPED, version) == torch.bfloat16
    monkeypatch.setattr(common, "flashinfer_version", lambda: (0, 6, 7))
    assert load_backend(TRTLLM).router_logits_dtype("fp8_block") == torch.float32
    run(FP8_BLOCK, contract.bypassed(GROUPED))
    assert trtllm.calls[-1].logits.dtype == torch.float32


def test_a_release_that_allocates_its_own_result(trtllm: TrtllmEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashinfer import fused_moe

    genuine = fused_moe.trtllm_fp8_block_scale_moe
    monkeypatch.setattr(fused_moe, "trtllm_fp8_block_scale_moe", lambda **arguments: [genuine(**arguments)])
    assert torch.equal(run(FP8_BLOCK, contract.bypassed(GROUPED)), trtllm.exact.bfloat16())


@rows(
    "method, changes, message",
    (RoutingMethod.SQRT_SOFTPLUS, {}, "sqrt_softplus"),
    (SIGMOID_GROUPED, {"normalize": False}, "normalizes"),
    (SOFTMAX_AFTER_TOPK, {"num_groups": 2}, "sigmoid_grouped"),
    (SIGMOID_GROUPED, {"num_experts": 6}, "multiple of 4"),
    (SIGMOID_GROUPED, {"num_groups": 8, "num_kept_groups": 5}, "must not exceed 4"),
    (SIGMOID_GROUPED, {"num_experts": 32, "top_k": 9}, "top_k 9"),
    (SIGMOID_GROUPED, {"num_groups": 4}, "must be below the 2"),
)
def test_routing_the_kernel_lacks(method: RoutingMethod, changes: dict[str, Any], message: str) -> None:
    rules = RoutingConfig(method=method, **({"num_experts": E, "top_k": 2} | changes))
    config = hostile.make_config(rules.num_experts, 256, 256, rules.top_k, routing=rules)
    assert message in str(load_backend(TRTLLM).unsupported_reason(config))
    with pytest.raises(UnsupportedPathError, match=message):
        MoeRunner(TRTLLM, NONE, config)


@rows(
    "name, ep_size, rules",
    ("fp8_block", 1, GROUPED),
    ("fp8_tensor", 1, GROUPED),
    ("nvfp4", 1, SOFTMAX),
    ("nvfp4", 2, GROUPED),
)
def test_the_self_check_covers_routing_inside_the_kernel(
    trtllm: TrtllmEmulator, monkeypatch: pytest.MonkeyPatch, name: str, ep_size: int, rules: RoutingConfig
) -> None:
    """A kernel that reads the logits upside down is right for given ids, and caught by the pass with logits."""
    del trtllm
    path, topology = path_of(TRTLLM, format_name=name), Topology(ep_size=ep_size, ep_rank=ep_size - 1)
    experts = contract.shard(path, contract.make_experts(path, 2), topology)
    config = contract.config_of(path, experts, topology, rules)
    info, runner = load_backend(TRTLLM).prepare(experts, config, topology), MoeRunner(TRTLLM, NONE, config)
    report = check_layer(runner, info, experts, layer=7, topology=topology)
    assert report.worst_error <= report.tolerance
    original = MoeRunner.run

    def upside_down(self: MoeRunner, dispatched: Any, quant_info: Any) -> Any:
        topk = dispatched.topk_output
        if isinstance(topk, BypassedTopK):
            worst_first = BypassedTopK(-topk.logits, topk.config, topk.correction_bias)
            dispatched = dataclasses.replace(dispatched, topk_output=worst_first)
        return original(self, dispatched, quant_info)

    monkeypatch.setattr(MoeRunner, "run", upside_down)
    with pytest.raises(SelfCheckError, match="what the kernel's own routing chose differs"):
        check_layer(runner, info, experts, layer=7, topology=topology)
