"""Shared experts beside the tokens that travel, and the refusals of a combine beside the second GEMM."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from model import moe_build, moe_layer
from model.parallel import ParallelLayout
from moe import MoeA2ABackend, MoeBackend
from moe.dispatch.deepep import DeepepDispatcher
from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings
from moe.dispatch.standard import StandardDispatcher
from moe.errors import UnsupportedPathError
from moe.group import RankGroups
from moe.runner import MoeRunner
from tests.emulators.deepep import install_deepep
from tests.model.parallel_cases import run_steps
from tests.model.parallel_checkpoints import write_checkpoint
from tests.model.rank_threads import load_rank, run_layout
from tests.tables import rows

LIMIT = 20
DEEPEP, NONE = MoeA2ABackend.DEEPEP, MoeA2ABackend.NONE
SIZES = {"dp_size": 2, "ep_size": 2}


class Spy:
    """A side stream that notes who waits for whom; each rank, a thread, has a log of its own."""

    is_real = True
    here = threading.local()

    def __init__(self, device: torch.device) -> None:
        self.here.log = []

    @contextmanager
    def after(self, event: Any) -> Iterator[None]:
        self.here.log.append("fork")
        yield
        self.here.log.append("left")

    def join(self) -> None:
        self.here.log.append("join")


def spy_on(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    method = getattr(owner, name)

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        Spy.here.log.append(name)
        return method(self, *args, **options)

    monkeypatch.setattr(owner, name, noted)


def run_model(folder: Path, a2a: MoeA2ABackend = DEEPEP) -> list[tuple[dict[str, torch.Tensor], list[str]]]:
    def work(layout: ParallelLayout, groups: RankGroups) -> tuple[dict[str, torch.Tensor], list[str]]:
        deepep = DeepepSettings(max_dispatch_tokens=LIMIT)
        model = load_rank(folder, layout, groups, moe_a2a_backend=a2a, deepep=deepep, max_num_tokens=LIMIT)
        Spy.here.log = []
        return run_steps(model, layout), Spy.here.log

    return run_layout(SIZES, work)


def test_shared_experts_start_before_tokens_travel_and_are_joined_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_deepep(monkeypatch, wide=True)
    folder = write_checkpoint("deepseek", tmp_path / "deepseek")
    in_order = run_model(folder)
    monkeypatch.setattr(moe_build, "SideStream", Spy)
    for name in ("dispatch", "combine"):
        spy_on(monkeypatch, DeepepDispatcher, name)
    spy_on(monkeypatch, MoeRunner, "run")
    for (want, _), (got, log) in zip(in_order, run_model(folder), strict=True):
        assert want.keys() == got.keys()
        assert all(torch.equal(want[name], got[name]) for name in want), "equal bit for bit"
        layer = ["fork", "left", "dispatch", "run", "combine", "join"]
        assert log == layer * (len(log) // len(layer))
        assert len(log) >= 2 * len(layer)


@pytest.mark.parametrize("most_tokens", [0, LIMIT])
def test_without_a_transport_they_run_beside_the_routed_ones_of_few_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_tokens: int
) -> None:
    folder = write_checkpoint("deepseek", tmp_path / "deepseek")
    in_order = run_model(folder, NONE)
    monkeypatch.setattr(moe_build, "SideStream", Spy)
    monkeypatch.setattr(moe_layer, "MOST_TOKENS_BESIDE", most_tokens)
    spy_on(monkeypatch, MoeRunner, "run")
    for (want, _), (got, log) in zip(in_order, run_model(folder, NONE), strict=True):
        assert all(torch.equal(want[name], got[name]) for name in want), "equal bit for bit"
        layer = ["fork", "left", "run", "join"] if most_tokens else ["run"]
        assert log == layer * (len(log) // len(layer))
        assert len(log) >= 2 * len(layer)


@pytest.mark.parametrize("broken", [(StandardDispatcher, "dispatch"), (MoeRunner, "run")], ids=str)
def test_a_step_that_fails_waits_for_the_shared_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: tuple[type, str]
) -> None:
    """The step may be tried again: its memory and counters must not be in use."""
    monkeypatch.setattr(moe_build, "SideStream", Spy)

    def work(layout: ParallelLayout, groups: RankGroups) -> list[str]:
        model = load_rank(write_checkpoint("deepseek", tmp_path / "deepseek"), layout, groups, max_num_tokens=LIMIT)
        monkeypatch.setattr(*broken, Broken().forward)
        Spy.here.log = []
        with pytest.raises(RuntimeError, match="a bug"):
            model.moe_layers[0](torch.ones(3, 256))
        return Spy.here.log

    assert run_layout({}, work) == [["fork", "left", "join"]]


class Broken(torch.nn.Module):
    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("a bug in the shared experts")


def test_shared_experts_that_fail_leave_no_rank_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of one rank comes after its tokens were sent, and the other gets an answer, which is not a number."""
    install_deepep(monkeypatch, wide=True)
    monkeypatch.setattr(moe_build, "SideStream", Spy)
    folder = write_checkpoint("deepseek", tmp_path / "deepseek")

    def work(layout: ParallelLayout, groups: RankGroups) -> Any:
        settings = DeepepSettings(max_dispatch_tokens=LIMIT)
        model = load_rank(folder, layout, groups, moe_a2a_backend=DEEPEP, deepep=settings, max_num_tokens=LIMIT)
        layer = model.moe_layers[0]
        if layout.rank == 1:
            layer.shared_experts = Broken()
        try:
            return layer(torch.ones(3, 256))
        except RuntimeError as error:
            return str(error)

    first, second = run_layout(SIZES, work)
    assert second == "a bug in the shared experts"
    assert first.isnan().any()


@rows(
    "backend, a2a, mode, message",
    (MoeBackend.TORCH, NONE, DeepepMode.AUTO, "--moe-a2a-backend none has no combine that takes signals"),
    (MoeBackend.TORCH, DEEPEP, DeepepMode.NORMAL, "deepep with --deepep-mode normal has no combine"),
    (MoeBackend.TORCH, DEEPEP, DeepepMode.AUTO, "second GEMM of --moe-backend torch .*: use flashinfer_cutedsl"),
)
def test_what_cannot_overlap_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: MoeBackend, a2a: MoeA2ABackend, mode: DeepepMode,
    message: str,
) -> None:  # fmt: skip
    install_deepep(monkeypatch, wide=True)
    folder = write_checkpoint("deepseek", tmp_path / "deepseek")
    deepep = DeepepSettings(mode=mode, max_dispatch_tokens=LIMIT, overlaps_down_gemm=True)

    def load(layout: ParallelLayout, groups: RankGroups) -> None:
        load_rank(folder, layout, groups, moe_backend=backend, moe_a2a_backend=a2a, deepep=deepep, max_num_tokens=LIMIT)

    with pytest.raises(UnsupportedPathError, match=f"enable_single_batch_overlap is set, but .*{message}"):
        run_layout(SIZES, load)
