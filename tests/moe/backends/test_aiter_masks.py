"""Which calls get an expert mask, and what aiter takes one for (G63)."""

import pytest
import torch

from moe import MoeA2ABackend, MoeRunnerConfig, Topology
from moe.backends.aiter.permutes import with_sink, without_holes
from moe.config import DispatchDtype, DispatchFormat
from moe.dispatch.deepep_settings import DeepepMode
from moe.errors import UnsupportedPathError
from moe.formats import ExpertWeights
from tests.emulators.aiter import Aiter, install_aiter
from tests.emulators.deepep import install_deepep
from tests.emulators.mori import install_mori
from tests.emulators.refusal import KernelRefusal
from tests.moe.backends import hostile
from tests.moe.backends.aiter_cases import (
    BACKEND,
    TOLERANCE,
    E,
    H,
    K,
    behind,
    deepep_for,
    experts_of,
    mori_for,
    run_alone,
)
from tests.moe.dispatch import several_ranks
from tests.tables import rows

DEEPEP, MORI = MoeA2ABackend.DEEPEP, MoeA2ABackend.MORI


@rows("ep_size", 1, 2)
@rows("name", *list(TOLERANCE))
def test_tuned_kernels_are_looked_up_by_the_layers_top_k(
    monkeypatch: pytest.MonkeyPatch, name: str, ep_size: int
) -> None:
    """G63: one rank needs no mask. With one, aiter subtracts 1 from top-k; an always masked column makes up for it."""
    emulator = install_aiter(monkeypatch)
    run_alone(name, Topology(ep_size=ep_size))
    call = emulator.calls[-1]
    assert (call.expert_mask is None) == (ep_size == 1)
    assert (call.tuned_top_k, call.topk_ids.shape[1]) == (K, K + (ep_size > 1))


@rows("name, ep_size", ("mxfp4", 1), ("fp8_block", 2))
def test_low_latency_is_top_1_and_divides_by_nothing(monkeypatch: pytest.MonkeyPatch, name: str, ep_size: int) -> None:
    """G63: rows have one expert; aiter took that for top-0, and MXFP4 and few rows of FP8 blocks divided by zero."""
    emulator = install_aiter(monkeypatch, wide=True)
    install_deepep(monkeypatch, wide=True)
    build = deepep_for(DeepepMode.LOW_LATENCY, 2048)
    assert behind(DEEPEP, DispatchFormat.DEEPEP_LL, build, name, [3] * ep_size) < TOLERANCE[name]
    assert {call.tuned_top_k for call in emulator.calls} == {1}
    assert all(call.expert_mask is not None for call in emulator.calls), "rows past the count must cost nothing"


def test_the_emulator_divides_by_zero_as_the_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = install_aiter(monkeypatch)
    info = BACKEND.prepare(*layer("mxfp4"))
    mask = torch.tensor([1] * E + [0], dtype=torch.int32)
    ids = torch.full((4, 1), E, dtype=torch.int32)
    call = {"w1": info.w13, "w2": info.w2, "w1_scale": info.w13_scale, "w2_scale": info.w2_scale}
    options = {"quant_type": info.kernel.quant_types.per_1x32, "dtype": torch.bfloat16}
    with pytest.raises(ZeroDivisionError):
        emulator.fused_moe(hostile.tokens(4, H), topk_weight=torch.ones(4, 1), topk_ids=ids, expert_mask=mask, **call,
                           **options)  # fmt: skip
    with pytest.raises(KernelRefusal, match="two equal ids"):
        emulator.fused_moe(hostile.tokens(4, H), topk_weight=torch.ones(4, 2), topk_ids=ids.repeat(1, 2) * 0, **call,
                           **options)  # fmt: skip


def test_kernels_that_cannot_take_a_mask_run_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """G63: for shapes tuned for MXFP4 times MXFP4 the library refuses any mask; the error says how to go on."""
    install_aiter(monkeypatch, has_fp4_port=True)
    run_alone("mxfp4")
    with pytest.raises(UnsupportedPathError, match=r"does not support expert-parallel.*AITER_BYPASS_TUNE_CONFIG=1"):
        run_alone("mxfp4", Topology(ep_size=2))


@rows("a2a, layout", (DEEPEP, "deepep_normal"), (MORI, "mori_normal"), (MORI, "mori_ll"))
def test_a_transport_with_ranks_to_mask_uses_the_masked_column(
    monkeypatch: pytest.MonkeyPatch, a2a: MoeA2ABackend, layout: str
) -> None:
    emulator = install_aiter(monkeypatch, wide=True)
    install_deepep(monkeypatch, wide=True)
    install_mori(monkeypatch, wide=True)
    low_latency = layout == "mori_ll"
    build = (
        deepep_for(DeepepMode.NORMAL, H) if a2a is DEEPEP else mori_for(DispatchDtype.BF16, low_latency=low_latency)
    )  # fmt: skip
    assert behind(a2a, DispatchFormat(layout), build, "mxfp4", [5, 4]) < TOLERANCE["mxfp4"]
    assert {(call.tuned_top_k, call.topk_ids.shape[1]) for call in emulator.calls} == {(K, K + 1)}


def test_mori_on_one_rank_has_no_mask_and_ignores_garbage_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """G63: a hole arrives as an expert with weight 0; it must not name an expert that its row also visits."""
    emulator: Aiter = install_aiter(monkeypatch, wide=True)
    install_mori(monkeypatch, wide=True)
    error = behind(MORI, DispatchFormat.MORI_NORMAL, mori_for(DispatchDtype.BF16), "bf16", [5])
    assert error < TOLERANCE["bf16"]
    assert emulator.calls[-1].expert_mask is None


def test_holes_get_experts_that_the_row_does_not_visit(subtests: pytest.Subtests) -> None:
    """G63: holes get different experts that the row does not visit; aiter's sorting keeps one of two equal ids."""
    for ids, filled in [
        ([[0, 1, 2]], [[0, 1, 2]]),
        ([[-1, 0, -1]], [[1, 0, 2]]),
        ([[-1, -1, -1]], [[0, 1, 2]]),
        ([[2, -1, 0]], [[2, 1, 0]]),
        ([[7, 6, -1]], [[7, 6, 0]]),
        ([[-1, 1, 10**6]], [[0, 1, 10**6]]),
    ]:
        with subtests.test(ids=ids, filled=filled):
            weights = torch.tensor([[0.5, 0.25, 2.0]])
            got, got_weights = without_holes(torch.tensor(ids, dtype=torch.int32), weights, E)
            assert (got.tolist(), got.dtype) == (filled, torch.int32)
            assert got_weights.tolist() == [
                [w if i >= 0 else 0.0 for i, w in zip(ids[0], weights[0].tolist(), strict=True)]
            ]


def test_holes_where_every_expert_is_chosen_or_missing() -> None:
    for num_experts in (1, 2, 5):
        g = torch.Generator().manual_seed(num_experts)
        ids = torch.rand(64, num_experts, generator=g).argsort(1).int()
        ids[torch.rand(ids.shape, generator=g) < 0.5] = -1
        got, weights = without_holes(ids, torch.ones(ids.shape), num_experts)
        assert torch.equal(got.sort(1).values, torch.arange(num_experts).expand_as(got).int())
        assert torch.equal(weights == 0, ids < 0)


def test_the_sink_is_the_masks_last_id() -> None:
    mask = torch.tensor([0, 0, 1, 1, 0], dtype=torch.int32)
    ids, weights = with_sink(torch.tensor([[3, -1], [0, 2]]), torch.ones(2, 2), mask)
    assert ids.tolist() == [[3, 4, 4], [0, 2, 4]]
    assert weights.tolist() == [[1, 1, 0], [1, 1, 0]]
    assert ids.dtype == torch.int32


def layer(name: str) -> tuple[ExpertWeights, MoeRunnerConfig, Topology]:
    experts = experts_of(name)
    return experts, several_ranks.layer_config(experts, torch.bfloat16), Topology()
