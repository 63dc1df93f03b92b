"""NVFP4 on the fused CuTe-DSL wrapper (v2), and what both layouts share, against emulated compiled functions."""

import dataclasses

import pytest
import torch

from moe import (
    Activation,
    MoeA2ABackend,
    MoeBackend,
    MoeConfigError,
    MoeRunner,
    RankPlace,
    StandardDispatchOutput,
    Topology,
    UnsupportedPathError,
)
from moe.backends.flashinfer.cutedsl import (
    CuteDslFp4MoeQuantInfo,
    is_flashinfer_cutedsl_v1_path,
)
from moe.device import Device
from moe.errors import WeightFormatError
from moe.types import FlashinferCombineInput, FlashinferDispatchOutput
from tests.emulators import layouts, numbers
from tests.emulators.cutedsl import CutedslEmulator, install_cutedsl
from tests.moe.backends import hostile
from tests.moe.backends.cutedsl_cases import (
    BACKEND,
    DEEPEP,
    FLASHINFER,
    NONE,
    TOLERANCE,
    TOPK,
    E,
    H,
    I,
    K,
    T,
    X,
    config_for,
    dispatch_ll,
    expected_v2,
    low_latency_slots,
    make_experts,
    run_v2,
    v1_runner,
)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> CutedslEmulator:
    return install_cutedsl(monkeypatch)


@pytest.mark.parametrize("per_half", [False, True])
def test_v2_numbers(kernel: CutedslEmulator, per_half: bool) -> None:
    experts = make_experts(per_half=per_half)
    got = run_v2(experts, Topology())
    assert kernel.exact is not None
    assert hostile.relative_error(kernel.exact, expected_v2(experts)) < TOLERANCE
    assert torch.equal(got, kernel.exact.bfloat16())
    assert torch.equal(got[2], torch.zeros(H, dtype=torch.bfloat16)), "all ids of this token are -1"


@pytest.mark.parametrize(("tp_size", "ep_size"), [(1, 2), (1, 8), (3, 2)])
def test_v2_ranks_sum_to_one(kernel: CutedslEmulator, tp_size: int, ep_size: int) -> None:
    experts = make_experts()
    total = torch.zeros(T, H)
    for ep_rank in range(ep_size):
        for tp_rank in range(tp_size):
            part = hostile.shard(experts, tp=(tp_size, tp_rank), ep=(ep_size, ep_rank), block=64)
            part = hostile.with_layer_scales(part, experts)
            run_v2(part, Topology(tp_size=tp_size, tp_rank=tp_rank, ep_size=ep_size, ep_rank=ep_rank))
            assert kernel.exact is not None
            total += kernel.exact
    assert hostile.relative_error(total, expected_v2(experts)) < TOLERANCE


@pytest.mark.parametrize("is_quantized", [False, True])
def test_v2_on_flashinfers_transport(kernel: CutedslEmulator, is_quantized: bool) -> None:
    experts = make_experts()
    config = config_for(experts)
    info = BACKEND.prepare(experts, config, Topology(a2a=FLASHINFER))
    x, scale = X, None
    if is_quantized:
        x, scale = numbers.quantize_nvfp4(X, info.input_quant)
    result = MoeRunner(MoeBackend.FLASHINFER_CUTEDSL, FLASHINFER, config).run(
        FlashinferDispatchOutput(x, TOPK, scale), info
    )
    assert isinstance(result, FlashinferCombineInput)
    assert not result.is_partial
    assert kernel.exact is not None
    assert hostile.relative_error(kernel.exact, expected_v2(experts)) < TOLERANCE


def test_v2_scalarisation_is_the_golden_one(kernel: CutedslEmulator) -> None:
    del kernel
    experts = hostile.quantized_experts("nvfp4", 3, H, I, x=X)
    w13 = dataclasses.replace(
        experts.w13,  # type: ignore[type-var]
        input_scale=torch.tensor([2.0, 4.0, 1.0]),
        scale_2=torch.tensor([0.5, 0.25, 1.0]),
    )
    info = BACKEND.prepare(dataclasses.replace(experts, w13=w13), hostile.make_config(3, H, I, 2), Topology())
    assert info.input_quant.tolist() == [0.25]
    assert info.w13_alpha.tolist() == [2.0, 1.0, 4.0]


def test_v2_layout(kernel: CutedslEmulator) -> None:
    del kernel
    experts = make_experts()
    info = BACKEND.prepare(experts, config_for(experts), Topology())
    assert info.w13_scale.shape == (32, 4, 3, 4, 4, E)
    gate, up = experts.w13.codes.chunk(2, dim=1)
    assert torch.equal(layouts.deinterleave(info.w13), torch.cat((up, gate), dim=1))
    assert torch.equal(info.w13[:, :64], up[:, :64])
    assert torch.equal(info.w13[:, 64:128], gate[:, :64])


def test_v2_wrapper_is_built_at_load_outside_inference_mode(
    kernel: CutedslEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    del kernel
    import flashinfer

    seen, genuine = [], flashinfer.CuteDslMoEWrapper

    class Recorder(genuine):  # type: ignore[misc, valid-type]
        def __init__(self, max_num_tokens: int, **arguments: object) -> None:
            seen.append((torch.is_inference_mode_enabled(), max_num_tokens, arguments))
            super().__init__(max_num_tokens=max_num_tokens, **arguments)

    monkeypatch.setattr(flashinfer, "CuteDslMoEWrapper", Recorder)
    experts = make_experts()
    part = hostile.with_layer_scales(hostile.shard(experts, ep=(4, 3)), experts)
    with torch.inference_mode():
        BACKEND.prepare(part, config_for(part, RankPlace(ep_size=4, ep_rank=3)), Topology(ep_size=4, ep_rank=3))
    is_inference, max_num_tokens, arguments = seen[0]
    assert not is_inference
    assert max_num_tokens == 8192
    assert (arguments["num_experts"], arguments["num_local_experts"], arguments["local_expert_offset"]) == (8, 2, 6)


def test_v2_holes_go_elsewhere_with_weight_zero(kernel: CutedslEmulator) -> None:
    experts = make_experts()
    part = hostile.with_layer_scales(hostile.shard(experts, ep=(2, 1)), experts)
    run_v2(part, Topology(ep_size=2, ep_rank=1))
    call = kernel.calls[-1]
    assert call.token_selected_experts[2].tolist() == [0, 0, 0], "an expert of rank 0"
    assert call.token_final_scales[2].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("a2a", [NONE, DEEPEP])
def test_the_answer_comes_from_the_topologys_allocator(kernel: CutedslEmulator, a2a: MoeA2ABackend) -> None:
    del kernel
    made = []

    def record(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(torch.full(shape, float("nan"), dtype=dtype, device=device))
        return made[-1]

    experts, topology = make_experts(), Topology(a2a=a2a, allocator=record)
    config = config_for(experts)
    info = BACKEND.prepare(experts, config, topology)
    if a2a is NONE:
        got = MoeRunner(MoeBackend.FLASHINFER_CUTEDSL, NONE, config).run(StandardDispatchOutput(X, TOPK), info)
    else:
        slots, masked_m, _ = low_latency_slots(TOPK, topology.expert_range(E))
        got = v1_runner(config).run(dispatch_ll(slots, masked_m), info)
    assert len(made) == 1
    assert got.hidden_states.data_ptr() == made[0].data_ptr()


def test_layouts_cannot_be_mixed_up(kernel: CutedslEmulator) -> None:
    del kernel
    experts = make_experts()
    config = config_for(experts)
    v1 = BACKEND.prepare(experts, config, Topology(a2a=DEEPEP))
    v2 = BACKEND.prepare(experts, config, Topology())
    with pytest.raises(MoeConfigError, match="runs layout v2, the weights are v1"):
        MoeRunner(MoeBackend.FLASHINFER_CUTEDSL, NONE, config).run(StandardDispatchOutput(X, TOPK), v1)
    slots, masked_m, _ = low_latency_slots(TOPK, range(E))
    with pytest.raises(MoeConfigError, match="runs layout v1, the weights are v2"):
        v1_runner(config).run(dispatch_ll(slots, masked_m), v2)
    with pytest.raises(MoeConfigError, match="needs a wrapper"):
        dataclasses.replace(v2, wrapper=None)
    with pytest.raises(MoeConfigError, match="has no wrapper"):
        dataclasses.replace(v1, wrapper=v2.wrapper)
    with pytest.raises(MoeConfigError, match=r"input_quant must be float32 \[1\]"):
        dataclasses.replace(v2, input_quant=v1.input_quant)
    assert isinstance(v1, CuteDslFp4MoeQuantInfo)


def test_one_predicate_tells_the_paths_apart() -> None:
    for backend in MoeBackend:
        for a2a in MoeA2ABackend:
            is_v1 = backend is MoeBackend.FLASHINFER_CUTEDSL and a2a is DEEPEP
            assert is_flashinfer_cutedsl_v1_path(backend, a2a) is is_v1


def test_supports() -> None:
    config = hostile.make_config(E, H, I, K)
    for a2a in MoeA2ABackend:
        reason = BACKEND.supports(Device(arch="sm100"), "nvfp4", a2a, config)
        assert (reason is None) == (a2a in (NONE, DEEPEP, FLASHINFER))
    assert "sm90" in str(BACKEND.supports(Device(arch="sm90"), "nvfp4", NONE, config))
    assert "mxfp4" in str(BACKEND.supports(Device(arch="sm100"), "mxfp4", NONE, config))
    clamped = hostile.make_config(E, H, I, K, activation=Activation(limit=10.0))
    assert "plain SwiGLU" in str(BACKEND.supports(Device(arch="sm100"), "nvfp4", NONE, clamped))


def test_refusals(kernel: CutedslEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    del kernel
    experts = make_experts()
    config = config_for(experts)
    with pytest.raises(WeightFormatError, match="takes nvfp4"):
        BACKEND.prepare(hostile.quantized_experts("bf16", E, H, I, x=X), config, Topology())
    b13, b2 = hostile.biases(E, H, I)
    with pytest.raises(WeightFormatError, match="biases"):
        BACKEND.prepare(dataclasses.replace(experts, b13=b13, b2=b2), config, Topology())
    for a2a in (NONE, DEEPEP):
        topology = Topology(ep_size=2, a2a=a2a)
        with pytest.raises(WeightFormatError, match="layer_input_scales"):
            BACKEND.prepare(hostile.shard(experts, ep=(2, 0)), config_for(experts, topology), topology)
    small = hostile.quantized_experts("nvfp4", E, H, 96, x=X)
    with pytest.raises(WeightFormatError, match="intermediate_size of this rank is 96"):
        BACKEND.prepare(small, config_for(small), Topology())
    import flashinfer.cute_dsl

    monkeypatch.setattr(flashinfer.cute_dsl, "is_cute_dsl_available", lambda: False)
    with pytest.raises(UnsupportedPathError, match="nvidia-cutlass-dsl"):
        BACKEND.prepare(experts, config, Topology())
