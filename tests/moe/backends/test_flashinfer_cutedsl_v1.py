"""NVFP4 on the masked grouped GEMMs (CuTe-DSL v1, DeepEP low latency), against emulated compiled functions."""

import dataclasses

import pytest
import torch

from moe import MoeBackend, MoeConfigError, MoeRunner, Topology, UnsupportedPathError
from moe.backends.flashinfer.cutedsl import CuteDslLayout, DownGemmOverlap
from moe.choose.select import choose_backend
from moe.config import DispatchFormat
from moe.device import Device
from moe.types import RowsCombineInput
from tests.emulators import layouts, numbers
from tests.emulators.cutedsl import CutedslEmulator, install_cutedsl
from tests.moe.backends import hostile
from tests.moe.backends.cutedsl_cases import (
    BACKEND,
    DEEPEP,
    LL_ONLY,
    TOLERANCE,
    TOPK,
    E,
    H,
    I,
    K,
    M,
    T,
    combine,
    config_for,
    dispatch_ll,
    expected_v1,
    low_latency_slots,
    make_experts,
    v1_runner,
)
from tests.tables import rows


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> CutedslEmulator:
    return install_cutedsl(monkeypatch)


@rows("ep_size", 1, 2, 8)
def test_v1_numbers_over_ranks(kernel: CutedslEmulator, ep_size: int) -> None:
    experts = make_experts()
    total = torch.zeros(T, H)
    for rank in range(ep_size):
        topology = Topology(ep_size=ep_size, ep_rank=rank, a2a=DEEPEP)
        part = hostile.with_layer_scales(hostile.shard(experts, ep=(ep_size, rank)), experts)
        config = config_for(part, topology)
        slots, masked_m, origin = low_latency_slots(TOPK, topology.expert_range(E))
        result = v1_runner(config).run(dispatch_ll(slots, masked_m), BACKEND.prepare(part, config, topology))
        assert isinstance(result, RowsCombineInput)
        assert not result.is_partial
        assert torch.equal(result.topk_ids, TOPK.ids.long())
        assert torch.equal(result.topk_weights, TOPK.weights)
        assert kernel.exact is not None
        total += combine(kernel.exact, TOPK, origin)
    assert hostile.relative_error(total, expected_v1(experts)) < TOLERANCE


def test_v1_writes_its_answer_to_the_topologys_allocator(kernel: CutedslEmulator) -> None:
    del kernel
    made = []

    def record(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(torch.full(shape, float("nan"), dtype=dtype, device=device))
        return made[-1]

    experts, topology = make_experts(), Topology(a2a=DEEPEP, allocator=record)
    config = config_for(experts)
    slots, masked_m, _ = low_latency_slots(TOPK, topology.expert_range(E))
    got = v1_runner(config).run(dispatch_ll(slots, masked_m), BACKEND.prepare(experts, config, topology))
    assert [tensor.data_ptr() for tensor in made] == [got.hidden_states.data_ptr()]


def test_v1_layout_and_scales(kernel: CutedslEmulator) -> None:
    del kernel
    experts = make_experts()
    info = BACKEND.prepare(experts, config_for(experts), Topology(a2a=DEEPEP))
    assert info.layout is CuteDslLayout.V1
    assert info.wrapper is None
    assert torch.equal(info.w13, experts.w13.codes), "[gate; up], not interleaved"
    restored = layouts.unswizzle(info.w13_scale.view(torch.uint8), 2 * I, H // 16)
    assert torch.equal(restored, experts.w13.scales.view(torch.uint8))
    in13, in2 = experts.w13.input_scale, experts.w2.input_scale
    assert info.input_quant.tolist() == [1 / float(in13.max())] * E
    assert torch.equal(info.mid_quant, 1 / in2)
    assert torch.equal(info.w13_alpha, in13.max() * experts.w13.scale_2)
    assert torch.equal(info.w2_alpha, in2 * experts.w2.scale_2)


def nvfp4_slots(slots: torch.Tensor, multiplier: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What an NVFP4 dispatch delivers: codes (M, H/2, E) and scales (32, 4, M/128, 4, H/64, E)."""
    codes, scales = numbers.quantize_nvfp4(slots.float(), multiplier)
    flat = layouts.swizzle(scales.view(torch.uint8))
    return codes.permute(1, 2, 0), flat.view(-1, M // 128, H // 64, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


def test_v1_takes_tokens_that_the_dispatch_quantized(kernel: CutedslEmulator) -> None:
    experts = make_experts()
    config, topology = config_for(experts), Topology(a2a=DEEPEP)
    info = BACKEND.prepare(experts, config, topology)
    slots, masked_m, _ = low_latency_slots(TOPK, topology.expert_range(E))
    v1_runner(config).run(dispatch_ll(slots, masked_m), info)
    first = kernel.exact
    codes, scale = nvfp4_slots(slots, float(info.input_quant[0]))
    quantized = dataclasses.replace(info, use_nvfp4_dispatch=True)
    v1_runner(config).run(dispatch_ll(codes, masked_m, scale), quantized)
    assert torch.equal(first.nan_to_num(), kernel.exact.nan_to_num())


def test_v1_refuses_tokens_of_another_kind_or_layout(kernel: CutedslEmulator) -> None:
    del kernel
    experts = make_experts()
    config, topology = config_for(experts), Topology(a2a=DEEPEP)
    info = BACKEND.prepare(experts, config, topology)
    quantized = dataclasses.replace(info, use_nvfp4_dispatch=True)
    slots, masked_m, _ = low_latency_slots(TOPK, topology.expert_range(E))
    codes, scale = nvfp4_slots(slots, 1.0)
    runner = v1_runner(config)
    cases = [
        (dispatch_ll(codes, masked_m, scale), info, "prepared for bfloat16"),
        (dispatch_ll(slots, masked_m), quantized, "prepared for NVFP4"),
        (dispatch_ll(slots.transpose(1, 2).contiguous().transpose(1, 2), masked_m), info, "contiguous"),
        (dispatch_ll(codes.contiguous(), masked_m, scale), quantized, "another memory layout"),
        (dispatch_ll(codes, masked_m, scale.contiguous()), quantized, "another memory layout"),
        (dispatch_ll(slots[:, :64].contiguous(), masked_m), info, "multiple of 128"),
    ]
    for dispatched, weights, message in cases:
        with pytest.raises(ValueError, match=message):
            runner.run(dispatched, weights)


def test_v1_overlap_reaches_the_second_gemm_once(kernel: CutedslEmulator) -> None:
    class Event:
        recorded = 0

        def record(self) -> None:
            self.recorded += 1

    experts = make_experts()
    config, topology = config_for(experts), Topology(a2a=DEEPEP)
    info = BACKEND.prepare(experts, config, topology)
    slots, masked_m, _ = low_latency_slots(TOPK, topology.expert_range(E))
    runner, event, signals = v1_runner(config), Event(), torch.zeros(4, dtype=torch.int32)
    runner.set_overlap_args(DownGemmOverlap(32, signals, event))
    runner.run(dispatch_ll(slots, masked_m), info)
    runner.run(dispatch_ll(slots, masked_m), info)
    assert [gemm.sm_count for gemm in kernel.gemms] == [148, 32, 148, 148]
    assert [gemm.dst_signals_tensor_gpu is signals for gemm in kernel.gemms] == [False, True, False, False]
    assert event.recorded == 1
    load_time = dataclasses.replace(info, overlap_args=DownGemmOverlap(16, signals))
    runner.run(dispatch_ll(slots, masked_m), load_time)
    assert kernel.gemms[-1].sm_count == 16
    runner.set_overlap_args(DownGemmOverlap(32, signals))
    with pytest.raises(MoeConfigError, match="keep one"):
        runner.run(dispatch_ll(slots, masked_m), load_time)
    runner.set_overlap_args("stream")
    with pytest.raises(MoeConfigError, match="DownGemmOverlap"):
        runner.run(dispatch_ll(slots, masked_m), info)


@rows("formats", None, (DispatchFormat.DEEPEP_NORMAL,))
def test_v1_is_refused_with_normal_and_auto_mode(formats: tuple[DispatchFormat, ...] | None) -> None:
    config = hostile.make_config(E, H, I, K)
    with pytest.raises(UnsupportedPathError, match=r"no path for deepep_normal.*deepep with deepep_ll only"):
        MoeRunner(MoeBackend.FLASHINFER_CUTEDSL, DEEPEP, config, dispatch_formats=formats)


def test_selection_knows_the_mode() -> None:
    config, device = hostile.make_config(E, H, I, K), Device(arch="sm100")
    chosen = choose_backend(MoeBackend.AUTO, device, "nvfp4", DEEPEP, config, dispatch_formats=LL_ONLY)
    assert chosen is MoeBackend.FLASHINFER_CUTEDSL
    with pytest.raises(UnsupportedPathError, match="no path from transport deepep is built in yet for deepep_normal"):
        choose_backend(MoeBackend.FLASHINFER_CUTEDSL, device, "nvfp4", DEEPEP, config)
