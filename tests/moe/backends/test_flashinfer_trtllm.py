"""FP8 and NVFP4 on the TRT-LLM kernels through the runner, against the emulated compiled module."""

import pytest
import torch

from moe import (
    Activation,
    BypassedTopK,
    MoeA2ABackend,
    MoeBackend,
    MoeRunner,
    MoeRunnerConfig,
    StandardDispatchOutput,
    StandardTopK,
    Topology,
    UnsupportedPathError,
)
from moe.backends.flashinfer import common as flashinfer_common
from moe.backends.flashinfer.trtllm import FlashinferTrtllmBackend, forced_logits_dtype
from moe.config import RoutingConfig, RoutingMethod
from moe.formats import ExpertWeights
from moe.routing import route
from tests.emulators.trtllm import TrtllmEmulator, install_trtllm
from tests.moe.backends import hostile
from tests.tables import rows

BACKEND = FlashinferTrtllmBackend()
E, H, I, K, T = 8, 256, 256, 2, 23
FORMATS = ("fp8_block", "fp8_tensor", "nvfp4")
TOLERANCE = 1e-3  # activations are quantized the same way
X = hostile.tokens(T, H, size=3.0)
DEEPSEEK = RoutingConfig(
    method=RoutingMethod.SIGMOID_GROUPED, num_experts=E, top_k=K, num_groups=4, num_kept_groups=2,
    routed_scaling_factor=hostile.FACTOR,
)  # fmt: skip
SOFTMAX = RoutingConfig(
    method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=E, top_k=K, routed_scaling_factor=hostile.FACTOR
)
BIAS = (torch.arange(E) * 0.0625 - 0.25).flip(0)  # every value fits bf16


def logits(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(T, E, generator=torch.Generator().manual_seed(5)).bfloat16().to(dtype)


def bypassed(rules: RoutingConfig, dtype: torch.dtype = torch.bfloat16) -> BypassedTopK:
    return BypassedTopK(logits(dtype), rules, BIAS if rules is DEEPSEEK else None)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> TrtllmEmulator:
    return install_trtllm(monkeypatch)


def config_for(experts: ExpertWeights, **changes: object) -> MoeRunnerConfig:
    return hostile.make_config(E, H, experts.intermediate_size, K, **changes)


def run(experts: ExpertWeights, topk: BypassedTopK | StandardTopK, topology: Topology) -> torch.Tensor:
    rules = topk.config if isinstance(topk, BypassedTopK) else None
    config = config_for(experts, routing=rules, place=topology)
    runner = MoeRunner(MoeBackend.FLASHINFER_TRTLLM, MoeA2ABackend.NONE, config)
    result = runner.run(StandardDispatchOutput(X, topk), BACKEND.prepare(experts, config, topology))
    assert result.is_partial == topology.is_partial
    assert result.hidden_states.dtype == torch.bfloat16
    return result.hidden_states


def as_kernel_weights(topk: StandardTopK) -> StandardTopK:
    """The kernel keeps its routing weights in bf16."""
    return StandardTopK(topk.weights.bfloat16().float(), topk.ids)


def expected(experts: ExpertWeights, topk: StandardTopK) -> torch.Tensor:
    return hostile.reference(X, as_kernel_weights(topk), hostile.layer_wide(experts), Activation())


@rows("name", *FORMATS)
@rows("rules", DEEPSEEK, SOFTMAX)
def test_numbers_with_routing_inside(kernel: TrtllmEmulator, name: str, rules: RoutingConfig) -> None:
    experts = hostile.quantized_experts(name, E, H, I, x=X)
    topk = bypassed(rules)
    got = run(experts, topk, Topology())
    want = route(topk.logits, rules, topk.correction_bias)
    assert torch.equal(kernel.routed[0].sort(-1).values.int(), want.ids.sort(-1).values)
    assert hostile.relative_error(kernel.exact, expected(experts, want)) < TOLERANCE
    assert torch.equal(got, kernel.exact.bfloat16())


@rows("name", *FORMATS)
def test_the_factor_scales_the_answer_once(kernel: TrtllmEmulator, name: str) -> None:
    del kernel
    experts = hostile.quantized_experts(name, E, H, I, x=X)
    answers = []
    for factor in (1.0, 2.0):
        rules = RoutingConfig(
            method=RoutingMethod.SIGMOID_GROUPED, num_experts=E, top_k=K, num_groups=4, num_kept_groups=2,
            routed_scaling_factor=factor,
        )  # fmt: skip
        answers.append(run(experts, BypassedTopK(logits(), rules, BIAS), Topology()).float())
    assert torch.equal(answers[1], 2 * answers[0])


@rows("name", *FORMATS)
@rows("asked", None, torch.float32, torch.bfloat16)
def test_dtype_of_logits_that_reaches_the_kernel(kernel: TrtllmEmulator, name: str, asked: torch.dtype | None) -> None:
    gate_dtype = BACKEND.router_logits_dtype(name) if asked is None else asked
    run(hostile.quantized_experts(name, E, H, I, x=X), bypassed(DEEPSEEK, gate_dtype), Topology())
    call = kernel.calls[-1]
    wanted = {None: torch.bfloat16, torch.float32: torch.float32, torch.bfloat16: torch.bfloat16}[asked]
    assert call.logits.dtype == (torch.bfloat16 if name == "fp8_tensor" else wanted)
    assert call.routing_bias.dtype == (torch.bfloat16 if name == "fp8_tensor" else torch.float32)


def test_near_ties_show_the_dtype_of_the_logits() -> None:
    fine = torch.tensor([[1.0, 1.001, 0.5, 0.0, -1, -1, -1, -1], [0.5, 2.0, 0.1, 0.2, 0, 0, 0, 0]])
    rules = RoutingConfig(method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=E, top_k=1)
    assert route(fine, rules).ids.tolist() == [[1], [1]]
    assert route(fine.bfloat16(), rules).ids.tolist() == [[0], [1]], "bf16 makes 1.0 and 1.001 one number"


def test_which_logits_older_releases_force() -> None:
    for version, deepseek in (((0, 6, 7), torch.float32), ((0, 6, 8), None), ((0, 7, 2), None)):
        assert forced_logits_dtype("fp8_block", DEEPSEEK, version) == deepseek
        assert forced_logits_dtype("nvfp4", SOFTMAX, version) is None
        assert forced_logits_dtype("fp8_tensor", DEEPSEEK, version) == torch.bfloat16


def test_an_older_release_gets_fp32_logits(kernel: TrtllmEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_common, "flashinfer_version", lambda: (0, 6, 7))
    assert BACKEND.router_logits_dtype("fp8_block") == torch.float32
    run(hostile.quantized_experts("fp8_block", E, H, I, x=X), bypassed(DEEPSEEK), Topology())
    assert kernel.calls[-1].logits.dtype == torch.float32


def test_call_arguments(kernel: TrtllmEmulator) -> None:
    experts = hostile.quantized_experts("nvfp4", E, H, I, x=X)
    part = hostile.with_layer_scales(hostile.shard(experts, ep=(4, 3)), experts)
    run(part, bypassed(DEEPSEEK), Topology(ep_size=4, ep_rank=3))
    call = kernel.calls[-1]
    assert (call.num_experts, call.num_local, call.offset, call.inter) == (8, 2, 6, I)
    assert (call.n_group, call.topk_group, call.factor) == (4, 2, hostile.FACTOR)


def test_tuning_bucket_and_routing_name(kernel: TrtllmEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    del kernel
    from flashinfer import fused_moe

    seen, genuine = [], fused_moe.trtllm_fp8_block_scale_moe

    def record(output: torch.Tensor, **arguments: object) -> object:
        seen.append(arguments)
        return genuine(output=output, **arguments)

    monkeypatch.setattr(fused_moe, "trtllm_fp8_block_scale_moe", record)
    run(hostile.quantized_experts("fp8_block", E, H, I, x=X), bypassed(SOFTMAX), Topology())
    assert seen[0]["tune_max_num_tokens"] == 32
    assert seen[0]["routing_method_type"] == fused_moe.RoutingMethodType.Renormalize.value


def test_a_release_that_allocates_its_own_result(kernel: TrtllmEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashinfer import fused_moe

    genuine = fused_moe.trtllm_fp8_block_scale_moe
    monkeypatch.setattr(fused_moe, "trtllm_fp8_block_scale_moe", lambda **arguments: [genuine(**arguments)])
    got = run(hostile.quantized_experts("fp8_block", E, H, I, x=X), bypassed(DEEPSEEK), Topology())
    assert torch.equal(got, kernel.exact.bfloat16())


@rows(
    "changes, message",
    ({"method": RoutingMethod.SQRT_SOFTPLUS}, "sqrt_softplus"),
    ({"method": RoutingMethod.SIGMOID_GROUPED, "normalize": False}, "normalizes"),
    ({"method": RoutingMethod.SOFTMAX_AFTER_TOPK, "num_groups": 2}, "sigmoid_grouped"),
    ({"method": RoutingMethod.SIGMOID_GROUPED, "num_experts": 6}, "multiple of 4"),
    ({"method": RoutingMethod.SIGMOID_GROUPED, "num_groups": 8, "num_kept_groups": 5}, "must not exceed 4"),
    ({"method": RoutingMethod.SIGMOID_GROUPED, "num_experts": 32, "top_k": 9}, "top_k 9"),
    ({"method": RoutingMethod.SIGMOID_GROUPED, "num_groups": 4, "top_k": 2}, "must be below the 2"),
)
def test_routing_the_kernel_lacks(changes: dict[str, object], message: str) -> None:
    rules = RoutingConfig(**({"num_experts": E, "top_k": K} | changes))  # type: ignore[arg-type]
    config = hostile.make_config(rules.num_experts, H, I, rules.top_k, routing=rules)
    assert message in str(BACKEND.unsupported_reason(config))
    with pytest.raises(UnsupportedPathError, match=message):
        MoeRunner(MoeBackend.FLASHINFER_TRTLLM, MoeA2ABackend.NONE, config)
