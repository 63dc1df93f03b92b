"""G70: GPT-OSS's experts on aiter: biases, clamp and padding go through the library's own arguments."""

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe import MoeA2ABackend, MoeRunner, StandardDispatchOutput, Topology
from moe.backends.aiter import gpt_oss as aiter_gpt_oss
from moe.backends.aiter.backend import GPT_OSS_MXFP4
from moe.backends.aiter.gpt_oss import GPT_OSS, HALF_ROWS
from moe.check.reference import reference_moe
from moe.check.selfcheck import check_layer
from moe.config import DispatchFormat
from moe.dispatch.deepep_settings import DeepepMode
from moe.errors import SelfCheckError, UnsupportedPathError, WeightFormatError
from moe.formats import ExpertWeights, Mxfp4Weight
from tests.emulators import aiter as emulated
from tests.emulators.aiter import install_aiter
from tests.emulators.deepep import install_deepep
from tests.moe.backends import hostile
from tests.moe.backends.aiter_cases import BACKEND
from tests.moe.backends.contract import AITER, NONE, E, K
from tests.moe.dispatch import several_ranks
from tests.tables import rows

H, I = 192, 160  # neither is a multiple of the tile


def experts_of(*, with_biases: bool = True, hidden: int = H, inter: int = I) -> ExpertWeights:
    return hostile.plain_experts("mxfp4", E, hidden, inter, has_biases=with_biases)


def config_of(experts: ExpertWeights, **changes: Any) -> Any:
    return several_ranks.layer_config(experts, torch.bfloat16, activation=GPT_OSS, **changes)


def run(experts: ExpertWeights, x: torch.Tensor, topk: Any) -> torch.Tensor:
    config = config_of(experts)
    info = BACKEND.prepare(experts, config, Topology())
    return MoeRunner(AITER, NONE, config).run(StandardDispatchOutput(x, topk), info).hidden_states


@rows("hidden, inter, with_biases", (H, I, True), (2880, 96, False), (256, 256, True))
def test_few_rows_equal_the_twin(monkeypatch: pytest.MonkeyPatch, hidden: int, inter: int, with_biases: bool) -> None:
    emulator = install_aiter(monkeypatch, wide=True)
    experts = experts_of(with_biases=with_biases, hidden=hidden, inter=inter)
    x, topk = hostile.tokens(9, hidden, size=6.0), hostile.routing(9, E, K)
    got = run(experts, x, topk)
    assert (got.shape, got.is_contiguous()) == (x.shape, True)
    assert hostile.relative_error(got, hostile.reference(x, topk, experts, GPT_OSS)) < 1e-5
    call = emulator.calls[-1]
    assert (call.hidden_pad, call.intermediate_pad) == (-hidden % 256, -inter % 256)
    assert (call.gate_mode, call.swiglu_limit, call.activation.name) == ("interleave", 7.0, "Swiglu")


def test_many_rows_are_rounded_to_fp8_and_stay_within_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    install_aiter(monkeypatch, wide=True)
    experts = experts_of()
    x, topk = hostile.tokens(256, H, size=6.0), hostile.routing(256, E, K)
    got, exact = run(experts, x, topk), hostile.reference(x, topk, experts, GPT_OSS)
    rounded = reference_moe(x, topk, experts, GPT_OSS, quantize_input=lambda x, weight: emulated.mxfp8(x))
    assert hostile.relative_error(got, rounded) < 1e-3
    assert 1e-2 < hostile.relative_error(got, exact) < GPT_OSS_MXFP4.tolerance / 1.5


@rows("hidden", 2048, 256)
@rows("mode", DeepepMode.NORMAL, DeepepMode.LOW_LATENCY)
def test_behind_deepep(monkeypatch: pytest.MonkeyPatch, mode: DeepepMode, hidden: int) -> None:
    """Low latency sends the smaller one padded to 2048 columns."""
    install_aiter(monkeypatch, wide=True)
    install_deepep(monkeypatch, wide=True)
    experts, inputs = experts_of(hidden=hidden, inter=32), several_ranks.rank_inputs([5, 4], hidden, torch.bfloat16)
    outputs = several_ranks.run_layer(
        experts, inputs, backend=AITER, a2a=MoeA2ABackend.DEEPEP, formats=mode.dispatch_formats,
        dispatcher_for=lambda rank, config: several_ranks.deepep(rank, mode, hidden), dtype=torch.bfloat16,
        activation=GPT_OSS,
    )  # fmt: skip
    wants = [reference_moe(x, topk, experts, GPT_OSS) for x, topk in inputs]
    assert hostile.relative_error(torch.cat(outputs), torch.cat(wants)) < 1e-5


@rows("num_rows", 9, 300)
def test_the_self_check_passes_and_sees_a_damaged_layer(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    install_aiter(monkeypatch)
    experts = experts_of()
    config = config_of(experts, max_num_tokens=num_rows)
    info, runner = BACKEND.prepare(experts, config, Topology()), MoeRunner(AITER, NONE, config)
    assert check_layer(runner, info, experts, layer=0, topology=Topology()).worst_error < 2e-2
    damaged_parts = dataclasses.replace(info.gpt_oss, b13=info.gpt_oss.b13.roll(1, 0))
    damaged = dataclasses.replace(info, gpt_oss=damaged_parts)
    with pytest.raises(SelfCheckError, match="layer 0, aiter/none"):
        check_layer(runner, damaged, experts, layer=0, topology=Topology())


def test_interleaved_layout_is_the_librarys_byte_map() -> None:
    """Gate and up alternate by 16 rows, checked against the formulas of `shuffle_weight_a16w4` and its scales."""
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (2, 512, 128), dtype=torch.uint8, generator=g)
    scales = torch.randint(120, 130, (2, 512, 8), dtype=torch.uint8, generator=g)
    experts = ExpertWeights(w13=Mxfp4Weight(codes, scales), w2=Mxfp4Weight(codes[:, :256], scales[:, :256]))
    laid_out = aiter_gpt_oss.prepare_gpt_oss(experts, experts.w13, experts.w2, Topology())  # type: ignore[arg-type]
    flat = laid_out.w13.view(torch.uint8).flatten(1)
    assert torch.equal(flat[:, :16], codes[:, 0, :16]), "gate row 0"
    assert torch.equal(flat[:, 16:32], codes[:, 1, :16]), "gate row 1"
    up_tile = HALF_ROWS * 128  # after the whole first tile of gate
    assert torch.equal(flat[:, up_tile : up_tile + 16], codes[:, 256, :16]), "up row 0"
    exponents = laid_out.w13_scale.view(2, -1)
    firsts = [scales[0, row, col] for row, col in ((0, 0), (256, 0), (0, 4), (256, 4), (1, 0), (257, 0))]
    assert exponents[0, :6].tolist() == [int(value) for value in firsts]
    decoded = emulated.Aiter("gfx950", wide=True)._mxfp4_interleaved(laid_out.w13, laid_out.w13_scale)
    assert torch.equal(decoded, experts.w13.dequantize())


def test_what_the_kernels_do_not_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install_aiter(monkeypatch)
    experts = experts_of(hidden=256, inter=256)
    config = several_ranks.layer_config(experts, torch.bfloat16)
    with pytest.raises(WeightFormatError, match="mxfp4 experts with biases are not supported"):
        BACKEND.prepare(experts, config, Topology())
    plain = hostile.plain_experts("bf16", E, 256, 256)
    old = SimpleNamespace(fused_moe=lambda hidden_states, expert_mask, num_local_tokens, dtype, a1_scale, bias1: None)
    monkeypatch.setitem(sys.modules, "aiter.fused_moe", old)
    BACKEND.prepare(plain, several_ranks.layer_config(plain, torch.bfloat16), Topology())
    with pytest.raises(UnsupportedPathError, match="no bias2, gate_mode, hidden_pad, intermediate_pad, swiglu_limit"):
        BACKEND.prepare(experts, config_of(experts), Topology())
    assert DispatchFormat.STANDARD in MoeRunner(AITER, NONE, config_of(experts)).dispatch_formats
