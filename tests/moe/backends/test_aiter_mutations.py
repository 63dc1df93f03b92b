"""Mistakes planted into the aiter path: each must change the numbers or be refused by the kernel."""

import dataclasses
from typing import Any

import pytest
import torch

from moe import Topology
from moe.backends.aiter import backend as aiter
from moe.backends.aiter import permutes as aiter_permutes
from moe.backends.aiter.backend import AiterBackend
from moe.check.reference import reference_moe
from moe.formats import ExpertWeights, Fp8BlockWeight, Mxfp4Weight
from moe.layouts.aiter import shuffle_weight
from tests.emulators.aiter import Aiter, install_aiter
from tests.emulators.refusal import KernelRefusal
from tests.moe.backends import hostile
from tests.moe.backends.aiter_cases import BACKEND, PLAIN, run_alone
from tests.tables import rows

WRONG_NUMBERS = [
    "halves swapped",
    "scales not shuffled",
    "weights not applied",
    "expert mask off by one",
    "wrong nibbles",
]
REFUSED = ["-1 passed on", "weight not shuffled", "mask in int64", "no masked column", "ids in int64", "flag lost"]
TWO_RANKS = Topology(ep_size=2, ep_rank=1)


def plant(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "halves swapped":
        patch_experts(monkeypatch, lambda part: {"w13": rotate_rows(part.w13)})
    elif name == "scales not shuffled":
        monkeypatch.setattr(aiter, "shuffle_e8m0", lambda scales: scales)
    elif name == "wrong nibbles":
        monkeypatch.setattr(aiter, "shuffle_weight", lambda codes: shuffle_weight(codes << 4 | codes >> 4))
    elif name == "weights not applied":
        patch_input(monkeypatch, lambda core: {"weights_RK": torch.ones_like(core.weights_RK)})
    elif name == "expert mask off by one":
        original_mask = aiter.expert_mask
        monkeypatch.setattr(aiter, "expert_mask", lambda *arguments: original_mask(*arguments).roll(-1))
    elif name == "-1 passed on":
        original_sink = aiter_permutes.with_sink
        monkeypatch.setattr(
            aiter_permutes, "with_sink",
            lambda ids, weights, mask: (padded_ids(ids), original_sink(ids, weights, mask)[1]),
        )  # fmt: skip
    elif name == "no masked column":
        patch_input(
            monkeypatch, lambda core: {"ids_RK": core.ids_RK[:, :-1], "weights_RK": core.weights_RK[:, :-1]}
        )  # fmt: skip
    elif name == "weight not shuffled":
        monkeypatch.setattr(aiter, "shuffle_weight", lambda codes: codes)
        monkeypatch.setattr(aiter, "mark_shuffled", lambda codes: codes)
    elif name == "mask in int64":
        patch_input(monkeypatch, lambda core: {"mask": core.mask.long()})
    elif name == "ids in int64":
        patch_input(monkeypatch, lambda core: {"ids_RK": core.ids_RK.long()})
    elif name == "flag lost":
        monkeypatch.setattr(aiter, "mark_shuffled", lambda codes: codes.view(codes.dtype))


def padded_ids(ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(ids.to(torch.int32), (0, 1), value=8)


def rotate_rows(weight: Mxfp4Weight) -> Mxfp4Weight:
    half = weight.shape[1] // 2
    return Mxfp4Weight(weight.codes.roll(half, 1), weight.scales.roll(half, 1))


def patch_experts(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    original = AiterBackend.prepare

    def prepare(self: Any, experts: ExpertWeights, *rest: Any) -> Any:
        return original(self, dataclasses.replace(experts, **change(experts)), *rest)

    monkeypatch.setattr(AiterBackend, "prepare", prepare)


def patch_input(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    original = aiter.AiterRunnerCore.run

    def run(self: Any, core_input: Any, *rest: Any) -> Any:
        return original(self, dataclasses.replace(core_input, **change(core_input)), *rest)

    monkeypatch.setattr(aiter.AiterRunnerCore, "run", run)


@rows("name", *WRONG_NUMBERS)
def test_planted_mistakes_are_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    emulator: Aiter = install_aiter(monkeypatch)
    plant(monkeypatch, name)
    _, x, topk, experts = run_alone("mxfp4", TWO_RANKS)
    want = reference_moe(
        x, topk, hostile.shard(experts, ep=(2, 1), block=256), PLAIN, first_expert=4,
        quantize_input=BACKEND.formats["mxfp4"].activation_quant,
    )  # fmt: skip
    assert emulator.exact is not None
    error = hostile.relative_error(emulator.exact, want)
    assert not error < 1e-2


@rows("name", *REFUSED)
def test_planted_mistakes_are_refused_by_the_kernel(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install_aiter(monkeypatch)
    plant(monkeypatch, name)
    with pytest.raises(KernelRefusal):
        run_alone("mxfp4", TWO_RANKS)


def test_a_carried_over_negative_zero_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install_aiter(monkeypatch, "gfx942")
    monkeypatch.setattr(aiter, "to_fnuz", lambda codes: codes.view(torch.uint8).view(torch.float8_e4m3fnuz))
    original = Fp8BlockWeight.quantize.__func__  # type: ignore[attr-defined]

    def with_negative_zero(cls: Any, dense: torch.Tensor) -> Any:
        weight = original(cls, dense)
        weight.data.view(torch.uint8)[..., 0] = 0x80
        return weight

    monkeypatch.setattr(Fp8BlockWeight, "quantize", classmethod(with_negative_zero))
    with pytest.raises(KernelRefusal, match="NaN among the weights"):
        run_alone("fp8_block")
