"""NVFP4 on the fused CuTe-DSL wrapper (v2), and what both layouts share, against emulated compiled functions."""

import dataclasses

import pytest
import torch

from moe import (
    MoeA2ABackend,
    MoeBackend,
    MoeConfigError,
    MoeRunner,
    RankPlace,
    StandardDispatchOutput,
    Topology,
    UnsupportedPathError,
)
from moe.backends.flashinfer.cutedsl import CuteDslFp4MoeQuantInfo, is_flashinfer_cutedsl_v1_path
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
    X,
    config_for,
    dispatch_ll,
    expected_v2,
    low_latency_slots,
    make_experts,
    run_v2,
    v1_runner,
)
from tests.tables import rows


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> CutedslEmulator:
    return install_cutedsl(monkeypatch)


def test_v2_with_a_scale_for_each_half(kernel: CutedslEmulator) -> None:
    experts = make_experts(per_half=True)
    run_v2(experts, Topology())
    assert kernel.exact is not None
    assert hostile.relative_error(kernel.exact, expected_v2(experts)) < TOLERANCE


@rows("is_quantized", False, True)
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


def test_refusals(kernel: CutedslEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    del kernel
    import flashinfer.cute_dsl

    experts, topology = make_experts(), Topology(ep_size=2, a2a=DEEPEP)
    with pytest.raises(WeightFormatError, match="layer_input_scales"):
        BACKEND.prepare(hostile.shard(experts, ep=(2, 0)), config_for(experts, topology), topology)
    monkeypatch.setattr(flashinfer.cute_dsl, "is_cute_dsl_available", lambda: False)
    with pytest.raises(UnsupportedPathError, match="nvidia-cutlass-dsl"):
        BACKEND.prepare(experts, config_for(experts), Topology())
