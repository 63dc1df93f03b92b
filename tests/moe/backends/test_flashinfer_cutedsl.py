"""NVFP4 on the CuTe-DSL kernels against emulated compiled functions: masked grouped GEMMs behind DeepEP's low latency
(v1), and the fused wrapper (v2).
"""

import dataclasses
from typing import Any

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, MoeRunner, RankPlace, StandardDispatchOutput, Topology
from moe.backends.flashinfer.cutedsl import CuteDslFp4MoeQuantInfo, DownGemmOverlap, is_flashinfer_cutedsl_v1_path
from moe.choose.select import choose_backend
from moe.config import DispatchFormat
from moe.device import Device
from moe.errors import MoeConfigError, UnsupportedPathError, WeightFormatError
from moe.types import FlashinferCombineInput, FlashinferDispatchOutput
from tests.emulators import layouts, numbers
from tests.emulators.cutedsl import CutedslEmulator, install_cutedsl
from tests.moe.backends import contract, cutedsl_cases, hostile
from tests.moe.backends.contract import CUTEDSL, NONE
from tests.moe.backends.cutedsl_cases import BACKEND, DEEPEP, LL_ONLY, TOLERANCE, TOPK, E, H, I, K, M, X, dispatch_ll
from tests.tables import rows

CONFIG = hostile.make_config(E, H, I, K)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> CutedslEmulator:
    return install_cutedsl(monkeypatch)


@pytest.fixture
def v1(kernel: CutedslEmulator) -> CuteDslFp4MoeQuantInfo:
    del kernel
    return BACKEND.prepare(cutedsl_cases.make_experts(), CONFIG, Topology(a2a=DEEPEP))


@pytest.fixture
def v2(kernel: CutedslEmulator) -> CuteDslFp4MoeQuantInfo:
    del kernel
    return BACKEND.prepare(cutedsl_cases.make_experts(), CONFIG, Topology())


def run_v1(info: CuteDslFp4MoeQuantInfo, *dispatched: torch.Tensor, overlap: Any = None) -> torch.Tensor:
    """Slots, counts and scales as they arrive; without them, those of all tokens."""
    runner = cutedsl_cases.v1_runner(CONFIG)
    if overlap is not None:
        runner.set_overlap_args(overlap)
    return runner.run(dispatch_ll(*(dispatched or cutedsl_cases.low_latency_slots(range(E))[:2])), info).hidden_states


# ---- v1 ----


@rows("ep_size", 1, 2, 8)
def test_v1_numbers_over_ranks(kernel: CutedslEmulator, ep_size: int) -> None:
    total = cutedsl_cases.sum_of_v1(kernel, ep_size)
    assert hostile.relative_error(total, cutedsl_cases.expected_v1()) < TOLERANCE


def test_v1_writes_its_answer_to_the_topologys_allocator(v1: CuteDslFp4MoeQuantInfo) -> None:
    made = []

    def record(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(torch.full(shape, float("nan"), dtype=dtype, device=device))
        return made[-1]

    got = run_v1(dataclasses.replace(v1, topology=Topology(a2a=DEEPEP, allocator=record)))
    assert [tensor.data_ptr() for tensor in made] == [got.data_ptr()]


def test_v1_layout_and_scales(v1: CuteDslFp4MoeQuantInfo) -> None:
    experts = cutedsl_cases.make_experts()
    assert torch.equal(v1.w13, experts.w13.codes), "[gate; up], not interleaved"
    restored = layouts.unswizzle(v1.w13_scale.view(torch.uint8), 2 * I, H // 16)
    assert torch.equal(restored, experts.w13.scales.view(torch.uint8))
    in13, in2 = experts.w13.input_scale, experts.w2.input_scale
    assert v1.input_quant.tolist() == [1 / float(in13.max())] * E
    assert torch.equal(v1.mid_quant, 1 / in2)
    assert torch.equal(v1.w13_alpha, in13.max() * experts.w13.scale_2)
    assert torch.equal(v1.w2_alpha, in2 * experts.w2.scale_2)


def nvfp4_slots(slots: torch.Tensor, multiplier: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What an NVFP4 dispatch delivers: codes (M, H/2, E) and scales (32, 4, M/128, 4, H/64, E)."""
    codes, scales = numbers.quantize_nvfp4(slots.float(), multiplier)
    flat = layouts.swizzle(scales.view(torch.uint8))
    return codes.permute(1, 2, 0), flat.view(-1, M // 128, H // 64, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


def test_v1_takes_tokens_that_the_dispatch_quantized(kernel: CutedslEmulator, v1: CuteDslFp4MoeQuantInfo) -> None:
    slots, masked_m, _ = cutedsl_cases.low_latency_slots(range(E))
    run_v1(v1)
    first = kernel.exact
    codes, scale = nvfp4_slots(slots, float(v1.input_quant[0]))
    run_v1(dataclasses.replace(v1, use_nvfp4_dispatch=True), codes, masked_m, scale)
    assert torch.equal(first.nan_to_num(), kernel.exact.nan_to_num())


def test_v1_refuses_tokens_of_another_kind_or_layout(v1: CuteDslFp4MoeQuantInfo) -> None:
    quantized = dataclasses.replace(v1, use_nvfp4_dispatch=True)
    slots, masked_m, _ = cutedsl_cases.low_latency_slots(range(E))
    codes, scale = nvfp4_slots(slots, 1.0)
    for info, dispatched, message in (
        (v1, (codes, masked_m, scale), "prepared for bfloat16"),
        (quantized, (slots, masked_m), "prepared for NVFP4"),
        (v1, (slots.transpose(1, 2).contiguous().transpose(1, 2), masked_m), "contiguous"),
        (quantized, (codes.contiguous(), masked_m, scale), "another memory layout"),
        (quantized, (codes, masked_m, scale.contiguous()), "another memory layout"),
        (v1, (slots[:, :64].contiguous(), masked_m), "multiple of 128"),
    ):
        with pytest.raises(ValueError, match=message):
            run_v1(info, *dispatched)


def test_v1_overlap_reaches_the_second_gemm_once(kernel: CutedslEmulator, v1: CuteDslFp4MoeQuantInfo) -> None:
    class Event:
        recorded = 0

        def record(self) -> None:
            self.recorded += 1

    runner, event, signals = cutedsl_cases.v1_runner(CONFIG), Event(), torch.zeros(4, dtype=torch.int32)
    dispatched = dispatch_ll(*cutedsl_cases.low_latency_slots(range(E))[:2])
    runner.set_overlap_args(DownGemmOverlap(32, signals, event))
    runner.run(dispatched, v1)
    runner.run(dispatched, v1)
    assert [gemm.sm_count for gemm in kernel.gemms] == [148, 32, 148, 148]
    assert [gemm.dst_signals_tensor_gpu is signals for gemm in kernel.gemms] == [False, True, False, False]
    assert event.recorded == 1
    load_time = dataclasses.replace(v1, overlap_args=DownGemmOverlap(16, signals))
    run_v1(load_time)
    assert kernel.gemms[-1].sm_count == 16
    with pytest.raises(MoeConfigError, match="keep one"):
        run_v1(load_time, overlap=DownGemmOverlap(32, signals))
    with pytest.raises(MoeConfigError, match="DownGemmOverlap"):
        run_v1(v1, overlap="stream")


# ---- v2 ----


def test_v2_scalarisation_is_the_golden_one(kernel: CutedslEmulator) -> None:
    del kernel
    experts = hostile.quantized_experts("nvfp4", 3, H, I, x=X)
    input_scale, scale_2 = torch.tensor([2.0, 4.0, 1.0]), torch.tensor([0.5, 0.25, 1.0])
    w13 = dataclasses.replace(experts.w13, input_scale=input_scale, scale_2=scale_2)  # type: ignore[type-var]
    info = BACKEND.prepare(dataclasses.replace(experts, w13=w13), hostile.make_config(3, H, I, 2), Topology())
    assert info.input_quant.tolist() == [0.25]
    assert info.w13_alpha.tolist() == [2.0, 1.0, 4.0]


def test_v2_layout(v2: CuteDslFp4MoeQuantInfo) -> None:
    gate, up = cutedsl_cases.make_experts().w13.codes.chunk(2, dim=1)
    assert v2.w13_scale.shape == (32, 4, 3, 4, 4, E)
    assert torch.equal(layouts.deinterleave(v2.w13), torch.cat((up, gate), dim=1))
    assert torch.equal(v2.w13[:, :64], up[:, :64])
    assert torch.equal(v2.w13[:, 64:128], gate[:, :64])


@rows("is_quantized", False, True)
def test_v2_on_flashinfers_transport(kernel: CutedslEmulator, is_quantized: bool) -> None:
    experts = cutedsl_cases.make_experts()
    info = BACKEND.prepare(experts, CONFIG, Topology(a2a=MoeA2ABackend.FLASHINFER))
    x, scale = numbers.quantize_nvfp4(X, info.input_quant) if is_quantized else (X, None)
    runner = MoeRunner(CUTEDSL, MoeA2ABackend.FLASHINFER, CONFIG)
    result = runner.run(FlashinferDispatchOutput(x, TOPK, scale), info)
    assert isinstance(result, FlashinferCombineInput)
    assert not result.is_partial
    want = hostile.reference(X, TOPK, hostile.layer_wide(experts), CONFIG.activation)
    assert hostile.relative_error(kernel.exact, want) < TOLERANCE


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
    experts, place = cutedsl_cases.make_experts(), RankPlace(ep_size=4, ep_rank=3)
    part = hostile.with_layer_scales(hostile.shard(experts, ep=(4, 3)), experts)
    with torch.inference_mode():
        BACKEND.prepare(part, cutedsl_cases.config_for(part, place), Topology.at(place))
    is_inference, max_num_tokens, arguments = seen[0]
    assert not is_inference
    assert max_num_tokens == 8192
    assert (arguments["num_experts"], arguments["num_local_experts"], arguments["local_expert_offset"]) == (8, 2, 6)


def test_v2_holes_go_elsewhere_with_weight_zero(kernel: CutedslEmulator) -> None:
    path = contract.path_of(CUTEDSL)
    assert len(list(contract.run_ranks(path, contract.tokens(path), contract.TOPK, 1, 2))) == 2
    call = kernel.calls[-1]
    assert call.token_selected_experts[2].tolist() == [0, 0, 0], "an expert of rank 0"
    assert call.token_final_scales[2].tolist() == [0.0, 0.0, 0.0]


# ---- which layout ----


def test_layouts_cannot_be_mixed_up(v1: CuteDslFp4MoeQuantInfo, v2: CuteDslFp4MoeQuantInfo) -> None:
    with pytest.raises(MoeConfigError, match="runs layout v2, the weights are v1"):
        MoeRunner(CUTEDSL, NONE, CONFIG).run(StandardDispatchOutput(X, TOPK), v1)
    with pytest.raises(MoeConfigError, match="runs layout v1, the weights are v2"):
        run_v1(v2)
    for info, changes, message in (
        (v2, {"wrapper": None}, "needs a wrapper"),
        (v1, {"wrapper": v2.wrapper}, "has no wrapper"),
        (v2, {"input_quant": v1.input_quant}, r"input_quant must be float32 \[1\]"),
    ):
        with pytest.raises(MoeConfigError, match=message):
            dataclasses.replace(info, **changes)


def test_one_predicate_tells_the_paths_apart() -> None:
    for backend in MoeBackend:
        for a2a in MoeA2ABackend:
            assert is_flashinfer_cutedsl_v1_path(backend, a2a) is (backend is CUTEDSL and a2a is DEEPEP)


@rows("formats", None, (DispatchFormat.DEEPEP_NORMAL,))
def test_v1_is_refused_with_normal_and_auto_mode(formats: tuple[DispatchFormat, ...] | None) -> None:
    with pytest.raises(UnsupportedPathError, match=r"no path for deepep_normal.*deepep with deepep_ll only"):
        MoeRunner(CUTEDSL, DEEPEP, CONFIG, dispatch_formats=formats)


def test_selection_knows_the_mode() -> None:
    device = Device(arch="sm100")
    chosen = choose_backend(MoeBackend.AUTO, device, "nvfp4", DEEPEP, CONFIG, dispatch_formats=LL_ONLY)
    assert chosen is CUTEDSL
    with pytest.raises(UnsupportedPathError, match="no path from transport deepep is built in yet for deepep_normal"):
        choose_backend(CUTEDSL, device, "nvfp4", DEEPEP, CONFIG)


def test_refusals(kernel: CutedslEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    del kernel
    import flashinfer.cute_dsl

    experts, topology = cutedsl_cases.make_experts(), Topology(ep_size=2, a2a=DEEPEP)
    with pytest.raises(WeightFormatError, match="layer_input_scales"):
        BACKEND.prepare(hostile.shard(experts, ep=(2, 0)), cutedsl_cases.config_for(experts, topology), topology)
    monkeypatch.setattr(flashinfer.cute_dsl, "is_cute_dsl_available", lambda: False)
    with pytest.raises(UnsupportedPathError, match="nvidia-cutlass-dsl"):
        BACKEND.prepare(experts, CONFIG, Topology())
