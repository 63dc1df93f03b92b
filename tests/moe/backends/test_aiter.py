"""aiter through the runner behind every transport, against the twin with the path's activation rounding."""

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe import Activation, MoeA2ABackend, MoeBackend, MoeRunner, StandardDispatchOutput, StandardTopK, Topology
from moe.backend import DispatchContext
from moe.backends.aiter import backend as aiter
from moe.backends.aiter import permutes as aiter_permutes
from moe.backends.aiter.backend import AiterQuant, Arrival, resolve_quant
from moe.check.selfcheck import check_layer
from moe.config import DispatchDtype, DispatchFormat
from moe.device import Device
from moe.dispatch import mori
from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings
from moe.dispatch.mori import MoriSettings
from moe.dispatch.round_trip import check_round_trip
from moe.dispatch.transport import DispatchSpec, build_transport
from moe.errors import MoeConfigError, SelfCheckError, TransportStateError, UnsupportedPathError
from moe.formats.fp8 import to_fnuz
from moe.formats.token_groups import quantize_token_groups
from moe.layouts.aiter import shuffle_e8m0, shuffle_weight
from moe.types import RunState
from tests.emulators import aiter as emulated
from tests.emulators.aiter import Aiter, install_aiter
from tests.emulators.deepep import install_deepep
from tests.emulators.mori import install_mori
from tests.emulators.ranks import Rank, run_ranks
from tests.emulators.refusal import KernelRefusal
from tests.moe.backends import hostile
from tests.moe.backends.aiter_cases import BACKEND, LL_H, TOLERANCE, E, H, K, behind, deepep_for, experts_of, mori_for
from tests.moe.dispatch import several_ranks
from tests.tables import rows


@rows("name", *list(TOLERANCE))
def test_a_kernel_that_rounds_between_its_gemms_passes_the_self_check(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install_aiter(monkeypatch)
    original = Aiter._experts

    def rounding(self: Aiter, call: SimpleNamespace) -> Any:
        experts = original(self, call)
        quantize = experts.quantize_mid
        experts.quantize_mid = lambda mid, expert: quantize(mid.bfloat16().float(), expert)
        return experts

    monkeypatch.setattr(Aiter, "_experts", rounding)
    experts = experts_of(name)
    config = several_ranks.layer_config(experts, torch.bfloat16)
    info = BACKEND.prepare(experts, config, Topology())
    runner = MoeRunner(MoeBackend.AITER, MoeA2ABackend.NONE, config)
    assert check_layer(runner, info, experts, layer=0, topology=Topology()).worst_error > 0
    damaged = dataclasses.replace(info, w2=info.w2.view(torch.uint8).roll(1, 0).view(info.w2.dtype))
    aiter.mark_shuffled(damaged.w2)
    with pytest.raises(SelfCheckError, match="layer 0, aiter/none"):
        check_layer(runner, damaged, experts, layer=0, topology=Topology())


# ---- transports ----


# Every format on four ranks, of which one has no tokens; and two and eight ranks.
RANKS = [*((name, [3, 0, 8, 1]) for name in TOLERANCE), ("bf16", [5, 8]), ("fp8_block", [1, 2, 0, 4, 5, 0, 7, 8])]


@rows("name, num_tokens", *RANKS)
@rows("mode", DeepepMode.NORMAL, DeepepMode.LOW_LATENCY)
def test_behind_deepep(monkeypatch: pytest.MonkeyPatch, mode: DeepepMode, name: str, num_tokens: list[int]) -> None:
    emulator = install_aiter(monkeypatch, wide=True)
    install_deepep(monkeypatch, wide=True)
    layout = mode.dispatch_formats[0]
    hidden = LL_H if layout is DispatchFormat.DEEPEP_LL else H
    error = behind(MoeA2ABackend.DEEPEP, layout, deepep_for(mode, hidden), name, num_tokens)
    assert error < TOLERANCE[name]
    assert emulator.calls[-1].expert_mask.tolist() == [1] * (E // len(num_tokens)) + [0]
    routed = sum(
        int((topk.ids >= 0).sum()) for _, topk in several_ranks.rank_inputs(num_tokens, hidden, torch.bfloat16)
    )
    used = sum(int((call.topk_ids < call.expert_mask.numel() - 1).sum()) for call in emulator.calls)
    assert used == routed, "G63: rows past an expert's count, and the last column, go to the sink"


@rows("name, num_tokens", *RANKS)
@rows("low_latency", False, True)
def test_behind_mori(monkeypatch: pytest.MonkeyPatch, name: str, low_latency: bool, num_tokens: list[int]) -> None:
    emulator = install_aiter(monkeypatch, wide=True)
    groups = install_mori(monkeypatch, wide=True)
    layout = DispatchFormat.MORI_LL if low_latency else DispatchFormat.MORI_NORMAL
    dispatch_dtype = BACKEND.dispatch_dtype(
        DispatchContext(dispatch_format=layout, format_name=name, device=torch.device("cpu"))
    )
    error = behind(MoeA2ABackend.MORI, layout, mori_for(dispatch_dtype, low_latency=low_latency), name, num_tokens)
    assert error < TOLERANCE[name]
    assert emulator.calls[-1].expert_mask.numel() == E + 1
    assert dispatch_dtype.is_fp8 == (name == "fp8_block") == (emulator.calls[-1].a1_scale is not None)
    assert set(groups) == {"experts"}


@rows("dispatch_dtype, name", (DispatchDtype.BF16, "bf16"), (DispatchDtype.FP8, "fp8_block"))
def test_mori_truncation_keeps_every_received_row(
    monkeypatch: pytest.MonkeyPatch, dispatch_dtype: DispatchDtype, name: str
) -> None:
    emulator = install_aiter(monkeypatch, wide=True)
    install_mori(monkeypatch, wide=True)
    build = mori_for(dispatch_dtype, max_input_tokens=10)
    assert behind(MoeA2ABackend.MORI, DispatchFormat.MORI_NORMAL, build, name, [5, 4]) < TOLERANCE[name]
    assert {call.hidden_states.shape[0] for call in emulator.calls} == {10}
    with pytest.raises(TransportStateError, match="6 tokens on each of 2 ranks, but only 10"):
        behind(MoeA2ABackend.MORI, DispatchFormat.MORI_NORMAL, build, name, [6, 6])
    with pytest.raises(TransportStateError, match="9 tokens, but mori's max_dispatch_tokens is 8"):
        behind(MoeA2ABackend.MORI, DispatchFormat.MORI_NORMAL, mori_for(DispatchDtype.BF16), "bf16", [9, 9])


def test_mori_slots_without_an_expert_travel_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    install_mori(monkeypatch)

    def work(rank: Rank) -> int:
        nobody = StandardTopK(torch.ones(4, K), torch.full((4, K), -1, dtype=torch.int32))
        dispatched = mori_for(DispatchDtype.BF16)(rank, None).dispatch(hostile.tokens(4, H), nobody)
        return int(dispatched.num_recv_tokens)

    assert run_ranks(2, work) == [4, 4], "every rank keeps its own, with weight zero"


@rows("low_latency", False, True)
def test_mori_on_gfx942_sends_fnuz(monkeypatch: pytest.MonkeyPatch, low_latency: bool) -> None:
    """G64: tokens change to the variant of the GPU before they travel; mori has no kernel for the other one."""
    emulator = install_aiter(monkeypatch, "gfx942", wide=True)
    install_mori(monkeypatch, "gfx942", wide=True)
    layout = DispatchFormat.MORI_LL if low_latency else DispatchFormat.MORI_NORMAL
    build = mori_for(DispatchDtype.FP8, torch.float8_e4m3fnuz, low_latency=low_latency)
    assert behind(MoeA2ABackend.MORI, layout, build, "fp8_block", [5, 4]) < 1e-3
    assert emulator.calls[-1].hidden_states.dtype == torch.float8_e4m3fnuz
    with pytest.raises(KernelRefusal, match=r"no kernel for torch\.float8_e4m3fn on gfx942"):
        behind(MoeA2ABackend.MORI, layout, mori_for(DispatchDtype.FP8, low_latency=low_latency), "fp8_block", [5, 4])


@rows("arch", "gfx942", "gfx950")
def test_mori_is_built_for_the_fp8_of_the_gpu(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """G64: the transport that a model builds asks the device, and its round trip decodes what arrived."""
    install_mori(monkeypatch, arch)
    experts = experts_of("fp8_block")

    def work(rank: Rank) -> float:
        topology = Topology(ep_size=2, ep_rank=rank.rank(), a2a=MoeA2ABackend.MORI, dispatch_dtype=DispatchDtype.FP8)
        config = several_ranks.layer_config(experts, torch.bfloat16, place=topology, max_num_tokens=16)
        transport = build_transport(
            topology, config, group=rank, settings=DeepepSettings(), dispatch_dtypes={DispatchDtype.FP8}
        )
        dispatcher = transport.dispatcher(DispatchSpec(dispatch_dtype=DispatchDtype.FP8))
        formats = (DispatchFormat.MORI_NORMAL,)
        return check_round_trip(dispatcher, formats, config, topology, max_num_tokens=16)

    assert 0 < max(run_ranks(2, work)) < 6e-2


def test_mori_settings_and_payloads_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MoeConfigError, match="max_input_tokens is 0"):
        MoriSettings(max_input_tokens=0)
    with pytest.raises(UnsupportedPathError, match="sends bf16 or fp8, not nvfp4"):
        run_ranks(1, lambda rank: mori_for(DispatchDtype.NVFP4)(rank, None))
    monkeypatch.setitem(sys.modules, "mori", None)
    with pytest.raises(UnsupportedPathError, match="--moe-a2a-backend mori needs the package mori"):
        run_ranks(1, lambda rank: mori_for(DispatchDtype.BF16)(rank, None))
    assert [mori._kernel_name(*case) for case in ((False, 8), (False, 16), (True, 8), (True, 16))] == [
        "IntraNode", "InterNodeV1", "AsyncLL", "InterNodeV1LL",
    ]  # fmt: skip


# ---- layouts and tables ----


def test_weight_shuffle_golden_map() -> None:
    numbered = torch.arange(16 * 64).view(1, 16, 64)
    row, col = numbered // 64, numbered % 64
    flat = [(int(r), int(c)) for r, c in zip(shuffled_as_int(row), shuffled_as_int(col), strict=True)]
    assert (flat[16], flat[255], flat[256], flat[512]) == ((1, 0), (15, 15), (0, 16), (0, 32))


def shuffled_as_int(values: torch.Tensor) -> list[int]:
    return [int(value) for value in shuffle_weight(values.to(torch.uint8)).flatten()]


@rows("dtype", torch.uint8, torch.bfloat16, torch.float8_e4m3fn)
def test_weight_shuffle_is_the_emulators_byte_map(dtype: torch.dtype) -> None:
    weight = torch.randint(0, 120, (2, 48, 96 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    assert torch.equal(emulated.unshuffle_weight(shuffle_weight(weight)).view(torch.uint8), weight.view(torch.uint8))


def test_scale_shuffle_golden_map() -> None:
    numbered = torch.arange(32 * 8).view(32, 8)
    flat = shuffle_e8m0((numbered % 256).to(torch.uint8)).flatten()[:6].tolist()
    assert [(value // 8, value % 8) for value in flat] == [(0, 0), (16, 0), (0, 4), (16, 4), (1, 0), (17, 0)]
    scales = torch.randint(0, 255, (300, 11), dtype=torch.uint8)
    shuffled = shuffle_e8m0(scales)
    assert shuffled.shape == (512, 16)
    assert torch.equal(shuffled.flatten()[emulated.scale_positions(300, 11)], scales)


def test_fnuz_halves_values_and_has_no_negative_zero() -> None:
    codes = torch.tensor([0x00, 0x80, 0x38, 0xB8, 0x7E], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert (to_fnuz(codes).float() * 2).tolist() == [0.0, 0.0, 1.0, -1.0, 448.0]


@rows(
    "weights, arrival, quant, upcast",
    ("bf16", "bf16", "No", False),
    ("bf16", "fp8", "per_128x128", False),
    ("bf16", "fp4", "per_1x32", False),
    ("fp8_block", "bf16", "per_128x128", False),
    ("fp8_block", "fp8", "per_128x128", False),
    ("fp8_block", "fp4", "per_128x128", True),
    ("fp8_tensor", "bf16", "per_Token", False),
    ("fp8_tensor", "fp8", "per_Token", True),
    ("fp8_tensor", "fp4", "per_Token", True),
    ("mxfp4", "bf16", "per_1x32", False),
    ("mxfp4", "fp8", "per_1x32", True),
    ("mxfp4", "fp4", "per_1x32", False),
)
def test_activation_quantization_table(weights: str, arrival: str, quant: str, upcast: bool) -> None:
    assert resolve_quant(weights, Arrival(arrival)) == (AiterQuant(quant), upcast)


@rows("name", "mxfp4", "fp8_tensor")
def test_tokens_in_another_format_are_brought_back(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    emulator = install_aiter(monkeypatch)
    experts, x, topk = experts_of(name), hostile.tokens(6, H), hostile.routing(6, E, K)
    config = several_ranks.layer_config(experts, torch.bfloat16)
    info = BACKEND.prepare(experts, config, Topology())
    codes, scales = quantize_token_groups(x)
    MoeRunner(MoeBackend.AITER, MoeA2ABackend.NONE, config).run(StandardDispatchOutput(codes, topk, scales), info)
    call = emulator.calls[-1]
    assert call.hidden_states.dtype == torch.bfloat16
    assert call.a1_scale is None
    assert hostile.relative_error(call.hidden_states, x.float()) < 0.05


# ---- refusals ----


def test_gpt_oss_alone_has_clamped_experts_of_any_size() -> None:
    """G70: sizes are padded; and no other clamp is computed."""
    config = several_ranks.layer_config(experts_of("bf16"), torch.bfloat16)
    odd = dataclasses.replace(config.shape, hidden_size=2880)

    def reason(arch: str, name: str, activation: Activation, **changes: Any) -> str:
        changed = dataclasses.replace(config, activation=activation, **changes)
        return BACKEND.supports(Device(arch=arch), name, MoeA2ABackend.NONE, changed) or ""

    gpt_oss = Activation(alpha=1.702, beta=1.0, limit=7.0)
    assert reason("gfx950", "mxfp4", gpt_oss, shape=odd) == ""
    assert "gfx950" in reason("gfx942", "mxfp4", gpt_oss, shape=odd)
    for name, activation in (("bf16", gpt_oss), ("mxfp4", Activation(limit=10.0))):
        words = reason("gfx950", name, activation)
        assert f"is not supported for {name}, only plain SwiGLU" in words
        assert ("or Activation(alpha=1.702, beta=1.0, limit=7.0)" in words) == (name == "mxfp4")


def test_an_old_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install_aiter(monkeypatch, "gfx942")
    monkeypatch.setitem(sys.modules, "aiter.fused_moe", SimpleNamespace(fused_moe=lambda hidden_states, dtype: None))
    config = several_ranks.layer_config(experts_of("bf16"), torch.bfloat16)
    with pytest.raises(UnsupportedPathError, match="too old, fused_moe has no a1_scale, expert_mask"):
        BACKEND.prepare(experts_of("bf16"), config, Topology())


def test_the_library_is_imported_when_built_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    install_aiter(monkeypatch)
    experts = experts_of("bf16")
    config = several_ranks.layer_config(experts, torch.bfloat16)
    info = BACKEND.prepare(experts, config, Topology())
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} imported in a forward"))
    runner_core = aiter.AiterRunnerCore(config)
    dispatched = StandardDispatchOutput(hostile.tokens(3, H), hostile.routing(3, E, K))
    core_input = aiter_permutes.standard_to_aiter(dispatched, info, config, RunState())
    assert runner_core.run(core_input, info, RunState()).shape == (3, H)
