"""aiter through the runner behind every transport, against the twin with the path's activation rounding."""

import dataclasses
import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe import Activation, MoeA2ABackend, MoeRunner, StandardDispatchOutput, StandardTopK, Topology
from moe.backend import DispatchContext
from moe.backends.aiter import backend as aiter
from moe.backends.aiter import permutes as aiter_permutes
from moe.backends.aiter.backend import AiterQuant, Arrival, resolve_quant
from moe.backends.aiter.permutes import with_sink, without_holes
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
from tests.moe.backends import contract, hostile
from tests.moe.backends.aiter_cases import (
    BACKEND,
    TOLERANCE,
    H,
    behind_deepep,
    behind_mori,
    experts_of,
    mori_dispatcher,
)
from tests.moe.backends.contract import AITER, NONE, E, K, path_of
from tests.moe.dispatch import several_ranks
from tests.moe.moe_layers import GPT_OSS
from tests.tables import rows

BF16, FP8 = DispatchDtype.BF16, DispatchDtype.FP8
CONFIG = several_ranks.layer_config(experts_of("bf16"), torch.bfloat16)


@rows("name", *TOLERANCE)
def test_a_kernel_that_rounds_between_gemms_passes_the_self_check(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install_aiter(monkeypatch)
    original = Aiter._experts

    def rounding(self: Aiter, call: SimpleNamespace) -> Any:
        experts = original(self, call)
        quantize = experts.quantize_mid
        experts.quantize_mid = lambda mid, expert: quantize(mid.bfloat16().float(), expert)
        return experts

    monkeypatch.setattr(Aiter, "_experts", rounding)
    experts = experts_of(name)
    info, runner = BACKEND.prepare(experts, CONFIG, Topology()), MoeRunner(AITER, NONE, CONFIG)
    assert check_layer(runner, info, experts, layer=0, topology=Topology()).worst_error > 0
    damaged = dataclasses.replace(info, w2=info.w2.view(torch.uint8).roll(1, 0).view(info.w2.dtype))
    aiter.mark_shuffled(damaged.w2)
    with pytest.raises(SelfCheckError, match="layer 0, aiter/none"):
        check_layer(runner, damaged, experts, layer=0, topology=Topology())


# ---- transports ----


# Every format on four ranks, of which one has no tokens; and two and eight ranks.
RANKS = [*((name, [3, 0, 8, 1]) for name in TOLERANCE), ("bf16", [5, 8]), ("fp8_block", [1, 2, 0, 4, 5, 0, 7, 8])]


@rows(
    "mode, name, num_tokens",
    *((mode, *ranks) for mode, ranks in itertools.product((DeepepMode.NORMAL, DeepepMode.LOW_LATENCY), RANKS)),
    (DeepepMode.LOW_LATENCY, "mxfp4", [3]),
)
def test_behind_deepep(monkeypatch: pytest.MonkeyPatch, mode: DeepepMode, name: str, num_tokens: list[int]) -> None:
    """G63: rows of low latency have one expert; aiter took that for top-0, and divided by zero."""
    emulator = install_aiter(monkeypatch, wide=True)
    install_deepep(monkeypatch, wide=True)
    assert behind_deepep(mode, name, num_tokens) < TOLERANCE[name]
    assert emulator.calls[-1].expert_mask.tolist() == [1] * (E // len(num_tokens)) + [0]
    top_k = K if mode is DeepepMode.NORMAL else 1
    assert {(call.tuned_top_k, call.topk_ids.shape[1]) for call in emulator.calls} == {(top_k, top_k + 1)}
    routed = sum(int((topk.ids >= 0).sum()) for _, topk in several_ranks.rank_inputs(num_tokens, H, torch.bfloat16))
    used = sum(int((call.topk_ids < call.expert_mask.numel() - 1).sum()) for call in emulator.calls)
    assert used == routed, "G63: rows past an expert's count, and the last column, go to the sink"


@rows("name, num_tokens", *RANKS)
@rows("low_latency", False, True)
def test_behind_mori(monkeypatch: pytest.MonkeyPatch, name: str, low_latency: bool, num_tokens: list[int]) -> None:
    emulator = install_aiter(monkeypatch, wide=True)
    groups = install_mori(monkeypatch, wide=True)
    layout = DispatchFormat.MORI_LL if low_latency else DispatchFormat.MORI_NORMAL
    context = DispatchContext(dispatch_format=layout, format_name=name, device=torch.device("cpu"))
    dispatch_dtype = BACKEND.dispatch_dtype(context)
    assert behind_mori(name, num_tokens, dispatch_dtype, low_latency=low_latency) < TOLERANCE[name]
    assert emulator.calls[-1].expert_mask.numel() == E + 1
    assert {(call.tuned_top_k, call.topk_ids.shape[1]) for call in emulator.calls} == {(K, K + 1)}
    assert dispatch_dtype.is_fp8 == (name == "fp8_block") == (emulator.calls[-1].a1_scale is not None)
    assert set(groups) == {"experts"}


@rows("dispatch_dtype, name", (BF16, "bf16"), (FP8, "fp8_block"))
def test_mori_truncation_keeps_every_received_row(
    monkeypatch: pytest.MonkeyPatch, dispatch_dtype: DispatchDtype, name: str
) -> None:
    emulator = install_aiter(monkeypatch, wide=True)
    install_mori(monkeypatch, wide=True)
    assert behind_mori(name, [5, 4], dispatch_dtype, max_input_tokens=10) < TOLERANCE[name]
    assert {call.hidden_states.shape[0] for call in emulator.calls} == {10}
    with pytest.raises(TransportStateError, match="6 tokens on each of 2 ranks, but only 10"):
        behind_mori(name, [6, 6], dispatch_dtype, max_input_tokens=10)
    with pytest.raises(TransportStateError, match="9 tokens, but mori's max_dispatch_tokens is 8"):
        behind_mori("bf16", [9, 9], BF16)


def test_mori_slots_without_an_expert_travel_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    install_mori(monkeypatch)

    def work(rank: Rank) -> int:
        nobody = StandardTopK(torch.ones(4, K), torch.full((4, K), -1, dtype=torch.int32))
        return int(mori_dispatcher(rank, BF16).dispatch(hostile.tokens(4, H), nobody).num_recv_tokens)

    assert run_ranks(2, work) == [4, 4], "every rank keeps its own, with weight zero"


@rows("low_latency", False, True)
def test_mori_on_gfx942_sends_fnuz(monkeypatch: pytest.MonkeyPatch, low_latency: bool) -> None:
    """G64: tokens change to the variant of the GPU before they travel; mori has no kernel for the other one."""
    emulator = install_aiter(monkeypatch, "gfx942", wide=True)
    install_mori(monkeypatch, "gfx942", wide=True)
    fnuz = torch.float8_e4m3fnuz
    assert behind_mori("fp8_block", [5, 4], FP8, fnuz, low_latency=low_latency) < 1e-3
    assert emulator.calls[-1].hidden_states.dtype == fnuz
    with pytest.raises(KernelRefusal, match=r"no kernel for torch\.float8_e4m3fn on gfx942"):
        behind_mori("fp8_block", [5, 4], FP8, low_latency=low_latency)


@rows("arch", "gfx942", "gfx950")
def test_mori_is_built_for_the_fp8_of_the_gpu(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """G64: the transport that a model builds asks the device, and its round trip decodes what arrived."""
    install_mori(monkeypatch, arch)

    def work(rank: Rank) -> float:
        topology = Topology(ep_size=2, ep_rank=rank.rank(), a2a=MoeA2ABackend.MORI, dispatch_dtype=FP8)
        config = several_ranks.layer_config(
            experts_of("fp8_block"), torch.bfloat16, place=topology, max_num_tokens=16
        )  # fmt: skip
        transport = build_transport(topology, config, group=rank, settings=DeepepSettings(), dispatch_dtypes={FP8})
        dispatcher = transport.dispatcher(DispatchSpec(dispatch_dtype=FP8))
        return check_round_trip(dispatcher, (DispatchFormat.MORI_NORMAL,), config, topology, max_num_tokens=16)

    assert 0 < max(run_ranks(2, work)) < 6e-2


def test_mori_settings_and_payloads_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MoeConfigError, match="max_input_tokens is 0"):
        MoriSettings(max_input_tokens=0)
    with pytest.raises(UnsupportedPathError, match="sends bf16 or fp8, not nvfp4"):
        run_ranks(1, lambda rank: mori_dispatcher(rank, DispatchDtype.NVFP4))
    monkeypatch.setitem(sys.modules, "mori", None)
    with pytest.raises(UnsupportedPathError, match="--moe-a2a-backend mori needs the package mori"):
        run_ranks(1, lambda rank: mori_dispatcher(rank, BF16))
    assert [mori._kernel_name(*case) for case in ((False, 8), (False, 16), (True, 8), (True, 16))] == [
        "IntraNode", "InterNodeV1", "AsyncLL", "InterNodeV1LL",
    ]  # fmt: skip


# ---- which calls get an expert mask, and what aiter takes one for (G63) ----


@rows("ep_size", 1, 2)
@rows("name", *TOLERANCE)
def test_tuned_kernels_are_looked_up_by_the_top_k(monkeypatch: pytest.MonkeyPatch, name: str, ep_size: int) -> None:
    """One rank needs no mask. With one, aiter subtracts 1 from top-k; an always masked column makes up for it."""
    emulator = install_aiter(monkeypatch)
    run_rank(name, ep_size)
    call = emulator.calls[-1]
    assert (call.expert_mask is None) == (ep_size == 1)
    assert (call.tuned_top_k, call.topk_ids.shape[1]) == (K, K + (ep_size > 1))


def run_rank(name: str, ep_size: int) -> None:
    path, topology = (
        path_of(AITER, format_name=name, arch="gfx942" if name == "bf16" else "gfx950"),
        Topology(ep_size=ep_size),
    )
    run = contract.prepare(path, contract.shard(path, contract.make_experts(path), topology), topology)
    assert run(contract.tokens(path), contract.TOPK).is_partial == (ep_size > 1)


def test_kernels_that_cannot_take_a_mask_run_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """For shapes tuned for MXFP4 times MXFP4 the library refuses any mask; the error says how to go on."""
    install_aiter(monkeypatch, has_fp4_port=True)
    run_rank("mxfp4", 1)
    with pytest.raises(UnsupportedPathError, match=r"does not support expert-parallel.*AITER_BYPASS_TUNE_CONFIG=1"):
        run_rank("mxfp4", 2)


def test_the_emulator_divides_by_zero_as_the_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = install_aiter(monkeypatch)
    info = BACKEND.prepare(experts_of("mxfp4"), CONFIG, Topology())
    call = {
        "hidden_states": hostile.tokens(4, H), "w1": info.w13, "w2": info.w2, "w1_scale": info.w13_scale,
        "w2_scale": info.w2_scale, "quant_type": info.kernel.quant_types.per_1x32, "dtype": torch.bfloat16,
    }  # fmt: skip
    sink = torch.full((4, 1), E, dtype=torch.int32)
    with pytest.raises(ZeroDivisionError):
        emulator.fused_moe(**call, topk_weight=torch.ones(4, 1), topk_ids=sink, expert_mask=info.local_mask)
    with pytest.raises(KernelRefusal, match="two equal ids"):
        emulator.fused_moe(**call, topk_weight=torch.ones(4, 2), topk_ids=torch.zeros(4, 2, dtype=torch.int32))


def test_mori_on_one_rank_has_no_mask_and_ignores_garbage_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole arrives as an expert with weight 0; it must not name an expert that its row also visits."""
    emulator = install_aiter(monkeypatch, wide=True)
    install_mori(monkeypatch, wide=True)
    assert behind_mori("bf16", [5], BF16) < TOLERANCE["bf16"]
    assert emulator.calls[-1].expert_mask is None


@rows(
    "ids, filled",
    ([0, 1, 2], [0, 1, 2]),
    ([-1, 0, -1], [1, 0, 2]),
    ([-1, -1, -1], [0, 1, 2]),
    ([2, -1, 0], [2, 1, 0]),
    ([7, 6, -1], [7, 6, 0]),
    ([-1, 1, 10**6], [0, 1, 10**6]),
)
def test_holes_get_experts_that_the_row_does_not_visit(ids: list[int], filled: list[int]) -> None:
    """And different ones: aiter's sorting keeps one of two equal ids."""
    weights = [0.5, 0.25, 2.0]
    got, got_weights = without_holes(torch.tensor([ids], dtype=torch.int32), torch.tensor([weights]), E)
    assert (got.tolist(), got.dtype) == ([filled], torch.int32)
    assert got_weights.tolist() == [[w if i >= 0 else 0.0 for i, w in zip(ids, weights, strict=True)]]


@rows("num_experts", 1, 2, 5)
def test_holes_where_every_expert_is_chosen_or_missing(num_experts: int) -> None:
    g = torch.Generator().manual_seed(num_experts)
    ids = torch.rand(64, num_experts, generator=g).argsort(1).int()
    ids[torch.rand(ids.shape, generator=g) < 0.5] = -1
    got, weights = without_holes(ids, torch.ones(ids.shape), num_experts)
    assert torch.equal(got.sort(1).values, torch.arange(num_experts).expand_as(got).int())
    assert torch.equal(weights == 0, ids < 0)


def test_the_sink_is_the_masks_last_id() -> None:
    mask = torch.tensor([0, 0, 1, 1, 0], dtype=torch.int32)
    ids, weights = with_sink(torch.tensor([[3, -1], [0, 2]]), torch.ones(2, 2), mask)
    assert (ids.tolist(), ids.dtype) == ([[3, 4, 4], [0, 2, 4]], torch.int32)
    assert weights.tolist() == [[1, 1, 0], [1, 1, 0]]


# ---- layouts and tables ----


def test_weight_shuffle_golden_map() -> None:
    row, col = torch.meshgrid(torch.arange(16), torch.arange(64), indexing="ij")
    rows_at, cols_at = (shuffle_weight(each.to(torch.uint8)[None]).flatten().tolist() for each in (row, col))
    assert [(rows_at[at], cols_at[at]) for at in (16, 255, 256, 512)] == [(1, 0), (15, 15), (0, 16), (0, 32)]


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
    "weights, for_arrival",
    ("bf16", {"bf16": ("No", False), "fp8": ("per_128x128", False), "fp4": ("per_1x32", False)}),
    ("fp8_block", {"bf16": ("per_128x128", False), "fp8": ("per_128x128", False), "fp4": ("per_128x128", True)}),
    ("fp8_tensor", {"bf16": ("per_Token", False), "fp8": ("per_Token", True), "fp4": ("per_Token", True)}),
    ("mxfp4", {"bf16": ("per_1x32", False), "fp8": ("per_1x32", True), "fp4": ("per_1x32", False)}),
)
def test_activation_quantization_table(weights: str, for_arrival: dict[str, tuple[str, bool]]) -> None:
    """For each number format of tokens: how the kernel quantizes, and whether they are dequantized first."""
    for arrival, (quant, upcast) in for_arrival.items():
        assert resolve_quant(weights, Arrival(arrival)) == (AiterQuant(quant), upcast), arrival


@rows("name", "mxfp4", "fp8_tensor")
def test_tokens_in_another_format_are_brought_back(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    emulator = install_aiter(monkeypatch)
    x, topk = hostile.tokens(6, H), hostile.routing(6, E, K)
    info, (codes, scales) = BACKEND.prepare(experts_of(name), CONFIG, Topology()), quantize_token_groups(x)
    MoeRunner(AITER, NONE, CONFIG).run(StandardDispatchOutput(codes, topk, scales), info)
    call = emulator.calls[-1]
    assert (call.hidden_states.dtype, call.a1_scale) == (torch.bfloat16, None)
    assert hostile.relative_error(call.hidden_states, x.float()) < 0.05


# ---- refusals ----


def test_gpt_oss_alone_has_clamped_experts_of_any_size() -> None:
    """G70: sizes are padded; and no other clamp is computed."""
    odd = dataclasses.replace(CONFIG.shape, hidden_size=2880)

    def reason(arch: str, name: str, activation: Activation, **changes: Any) -> str:
        changed = dataclasses.replace(CONFIG, activation=activation, **changes)
        return BACKEND.supports(Device(arch=arch), name, NONE, changed) or ""

    assert reason("gfx950", "mxfp4", GPT_OSS, shape=odd) == ""
    assert "gfx950" in reason("gfx942", "mxfp4", GPT_OSS, shape=odd)
    for name, activation in (("bf16", GPT_OSS), ("mxfp4", Activation(limit=10.0))):
        words = reason("gfx950", name, activation)
        assert f"is not supported for {name}, only plain SwiGLU" in words
        assert ("or Activation(alpha=1.702, beta=1.0, limit=7.0)" in words) == (name == "mxfp4")


def test_an_old_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install_aiter(monkeypatch, "gfx942")
    monkeypatch.setitem(sys.modules, "aiter.fused_moe", SimpleNamespace(fused_moe=lambda hidden_states, dtype: None))
    with pytest.raises(UnsupportedPathError, match="too old, fused_moe has no a1_scale, expert_mask"):
        BACKEND.prepare(experts_of("bf16"), CONFIG, Topology())


def test_the_library_is_imported_when_built_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    install_aiter(monkeypatch)
    info = BACKEND.prepare(experts_of("bf16"), CONFIG, Topology())
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} imported in a forward"))
    dispatched = StandardDispatchOutput(hostile.tokens(3, H), hostile.routing(3, E, K))
    core_input = aiter_permutes.standard_to_aiter(dispatched, info, CONFIG, RunState())
    assert aiter.AiterRunnerCore(CONFIG).run(core_input, info, RunState()).shape == (3, H)
