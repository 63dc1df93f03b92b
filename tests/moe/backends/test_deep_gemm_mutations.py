"""Mistakes planted into the DeepGEMM path: each must change the numbers or be refused by the kernel."""

import dataclasses
from typing import Any

import pytest
import torch

from moe import Activation, MoeBackend, registry
from moe.backends.deep_gemm import backend as deep_gemm
from moe.backends.deep_gemm import permutes as deep_gemm_permutes
from moe.backends.deep_gemm.backend import DeepGemmBackend
from moe.config import DispatchFormat
from moe.dispatch.deepep_settings import DeepepMode
from moe.layouts.expert_slots import unpermute_sum
from moe.types import RowsCombineInput
from tests.emulators.deep_gemm import install_deep_gemm
from tests.emulators.deepep import install_deepep
from tests.emulators.refusal import KernelRefusal
from tests.moe.backends import hostile
from tests.moe.backends.deep_gemm_cases import run_alone, run_deepep, twin
from tests.tables import rows


def swapped(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1).contiguous()


MISTAKES = [
    "halves swapped",
    "block scales transposed",
    "scales of another expert",
    "weights applied twice",
    "weights never applied",
    "expert offset off by one",
    "factor applied twice",
]


def plant(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "halves swapped":
        patch_prepare(monkeypatch, lambda info: {"w13": swapped(info.w13), "w13_scale": swapped(info.w13_scale)})
    elif name == "block scales transposed":
        patch_prepare(monkeypatch, lambda info: {"w13_scale": info.w13_scale.transpose(1, 2).contiguous()})
    elif name == "scales of another expert":
        patch_prepare(monkeypatch, lambda info: {"w2_scale": info.w2_scale.roll(1, 0)})
    elif name == "weights applied twice":
        patch_sum(monkeypatch, lambda weights: weights * weights)
    elif name == "weights never applied":
        patch_sum(monkeypatch, torch.ones_like)
    elif name == "factor applied twice":
        patch_sum(monkeypatch, lambda weights: weights * hostile.FACTOR)
    elif name == "expert offset off by one":
        original = deep_gemm_permutes.local_ids
        monkeypatch.setattr(
            deep_gemm_permutes, "local_ids", lambda ids, owned: original(ids, range(owned.start + 1, owned.stop + 1))
        )


def patch_prepare(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    original = DeepGemmBackend.prepare

    def prepare(self: Any, *arguments: Any) -> Any:
        info = original(self, *arguments)
        return dataclasses.replace(info, **change(info))

    monkeypatch.setattr(DeepGemmBackend, "prepare", prepare)


def patch_sum(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    monkeypatch.setattr(
        deep_gemm_permutes, "unpermute_sum", lambda y, row, weights: unpermute_sum(y, row, change(weights))
    )


@rows("name", *MISTAKES)
def test_planted_mistakes_are_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(deep_gemm, "RESULT_DTYPE", torch.float32)
    install_deep_gemm(monkeypatch, wide=True)
    plant(monkeypatch, name)
    got, topk, experts, x = run_alone(30, activation=Activation())
    error = hostile.relative_error(got, twin(x, topk, experts, "sm90", Activation()))
    assert not error < 1e-2


@rows("name", "row-major scales", "padding without an expert id", "counts in int64")
def test_planted_layout_mistakes_are_refused_by_the_kernel(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install_deep_gemm(monkeypatch)
    num_tokens = 300
    if name == "row-major scales":
        monkeypatch.setattr(deep_gemm_permutes, "activation_scales", lambda scale, ue8m0: scale.contiguous())
    elif name == "padding without an expert id":
        original = deep_gemm_permutes._contiguous

        def holes(*arguments: Any) -> Any:
            result = original(*arguments)
            result.m_indices[5::128] = -1
            return result

        monkeypatch.setattr(deep_gemm_permutes, "_contiguous", holes)
    else:
        num_tokens = 5
        original_input = deep_gemm_permutes.MaskedInput

        def wide_counts(**fields: Any) -> Any:
            return original_input(**(fields | {"masked_m": fields["masked_m"].long()}))

        monkeypatch.setattr(deep_gemm_permutes, "MaskedInput", wide_counts)
    with pytest.raises(KernelRefusal):
        run_alone(num_tokens)


def test_low_latency_output_weighted_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "RESULT_DTYPE", torch.float32)
    install_deep_gemm(monkeypatch, wide=True)
    install_deepep(monkeypatch, wide=True)
    registry.load_backend(MoeBackend.DEEP_GEMM)

    def weighted(out: torch.Tensor, dispatched: Any, *rest: Any) -> RowsCombineInput:
        return dispatched.result(out * 0.8, is_partial=False)

    key = (MoeBackend.DEEP_GEMM, DispatchFormat.DEEPEP_LL)
    monkeypatch.setitem(registry._post_permutes, key, weighted)
    assert run_deepep(DeepepMode.LOW_LATENCY, "sm90", [4, 4]) > 1e-1
