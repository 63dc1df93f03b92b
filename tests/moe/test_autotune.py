"""Tuning policy: what is tuned, on which shapes, and that all ranks end with one verified choice."""

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from moe import MoeA2ABackend, MoeBackend, MoeRunner, Topology
from moe.autotune import (
    OneRank,
    TorchRanks,
    Tuning,
    kept_choice,
    local_input,
    run_locally,
    should_autotune,
    tune,
    tuning_token_counts,
)
from moe.backends.torch import TorchBackend
from moe.config import DispatchFormat
from moe.dispatch import deepep, flashinfer, mori, standard
from moe.errors import MoeConfigError
from moe.formats import ExpertWeights, Mxfp4Weight
from moe.tuning_cache import TuneKey, TuningCache
from tests.emulators.ranks import Rank, run_ranks
from tests.moe.backends import hostile

KEY = TuneKey(
    gpu="NVIDIA H100", library_versions=(("flashinfer-python", "0.7.2"), ("torch", "2.13.0")),
    backend=MoeBackend.FLASHINFER_MXFP4, a2a=MoeA2ABackend.NONE, format_name="mxfp4", tp_size=2, ep_size=4,
    num_local_experts=8, hidden_size=2880, intermediate_size=1440, top_k=4, token_counts=(1, 2, 4),
)  # fmt: skip
SECONDS = {"slow": 3.0, "fast": 1.0, "wrong": 0.5}


def tuning(log: list[tuple[str, int]] | None = None, seconds: dict[str, float] | None = None, **changes: Any) -> Tuning:
    seconds = seconds or SECONDS

    def measure(tactic: str, num_tokens: int) -> float:
        if log is not None:
            log.append((tactic, num_tokens))
        return seconds[tactic]

    fields: dict[str, Any] = {
        "key": KEY, "tactics": tuple(seconds), "measure": measure, "tolerance": 1e-2,
        "error": lambda tactic, num_tokens: float("nan") if tactic == "wrong" else 1e-3,
    }  # fmt: skip
    return Tuning(**(fields | changes))


def test_what_is_tuned() -> None:
    tuned = {(backend, a2a) for backend in MoeBackend for a2a in MoeA2ABackend if should_autotune(backend, a2a)}
    assert (MoeBackend.FLASHINFER_CUTEDSL, MoeA2ABackend.DEEPEP) not in tuned, "v1 has no tactics"
    assert (MoeBackend.FLASHINFER_CUTEDSL, MoeA2ABackend.NONE) in tuned
    assert (MoeBackend.FLASHINFER_CUTEDSL, MoeA2ABackend.FLASHINFER) in tuned
    assert {backend for backend, _ in tuned} == {
        MoeBackend.FLASHINFER_MXFP4, MoeBackend.FLASHINFER_CUTLASS, MoeBackend.FLASHINFER_CUTEDSL,
        MoeBackend.FLASHINFER_TRTLLM, MoeBackend.TRITON,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("max_tokens", "max_seqs", "counts"),
    [
        (8, 8, (1, 2, 4, 8)),
        (12, 5, (1, 2, 4, 5, 8, 12)),
        (1, 1, (1,)),
        (2048, 64, tuple(2**power for power in range(12))),
    ],
)
def test_tuning_shapes_end_at_the_schedulers_limits(max_tokens: int, max_seqs: int, counts: tuple[int, ...]) -> None:
    assert tuning_token_counts(max_tokens, max_seqs) == counts


def test_contradicting_limits_are_refused_with_both_numbers() -> None:
    with pytest.raises(MoeConfigError, match=r"max_num_seqs is 9.*max_num_batched_tokens 8"):
        tuning_token_counts(8, 9)


def test_fastest_right_tactic_wins_and_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log: list[tuple[str, int]] = []
    cache = TuningCache(tmp_path / "new" / "folder")
    assert kept_choice(KEY, cache, OneRank()) is None
    with caplog.at_level(logging.WARNING):
        choice = tune(tuning(log), cache, OneRank())
    assert choice == {"1": "fast", "2": "fast", "4": "fast"}
    assert log == [(tactic, count) for count in KEY.token_counts for tactic in SECONDS]
    assert "tactic wrong is off by inf" in caplog.text
    log.clear()
    assert tune(tuning(log), cache, OneRank()) == choice
    assert not log, "a kept choice is not measured again"
    assert kept_choice(KEY, cache, OneRank()) == choice


def test_no_right_tactic_is_an_error_and_nothing_is_kept(tmp_path: Path) -> None:
    with pytest.raises(MoeConfigError, match=r"no tactic stays within 0\.01 at 1 tokens"):
        tune(tuning(error=lambda tactic, num_tokens: 0.5), TuningCache(tmp_path), OneRank())
    assert not list(tmp_path.iterdir())
    with pytest.raises(MoeConfigError, match="names no tactics"):
        tuning(tactics=())


def test_every_field_of_the_key_changes_the_file() -> None:
    changes: dict[str, Any] = {
        "gpu": "NVIDIA H200", "library_versions": (("flashinfer-python", "0.7.3"), ("torch", "2.13.0")),
        "backend": MoeBackend.TRITON, "a2a": MoeA2ABackend.DEEPEP, "format_name": "bf16", "tp_size": 1, "ep_size": 1,
        "num_local_experts": 4, "hidden_size": 3072, "intermediate_size": 2880, "top_k": 2, "token_counts": (1, 2),
    }  # fmt: skip
    assert set(changes) == {field.name for field in dataclasses.fields(TuneKey)}
    names = {dataclasses.replace(KEY, **{field: value}).file_name for field, value in changes.items()}
    assert len(names | {KEY.file_name}) == len(changes) + 1


@pytest.mark.parametrize(
    "content", ["", "not json", "[]", '{"choice": 1}', json.dumps({"choice": {"1": "fast", "2": "fast"}})]
)
def test_damaged_or_partial_files_are_tuned_again(tmp_path: Path, content: str) -> None:
    (tmp_path / KEY.file_name).write_text(content)
    log: list[tuple[str, int]] = []
    tune(tuning(log), TuningCache(tmp_path), OneRank())
    assert log
    assert kept_choice(KEY, TuningCache(tmp_path), OneRank()) is not None


def test_an_unwritable_folder_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        choice = tune(tuning(), TuningCache(blocked / "below"), OneRank())
    assert choice["1"] == "fast"
    assert "tuned tactics are not kept" in caplog.text
    assert str(blocked) in caplog.text


# ---- several ranks ----


def rank_process(rank: int, folder: str, case: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet-{case}", rank=rank, world_size=2)
    try:
        cache = TuningCache(Path(folder) / (f"{case}-{rank}" if case == "one misses" else case))
        if case == "one misses" and rank == 0:
            cache.store(KEY, {"1": "slow", "2": "slow", "4": "slow"})
        # rank 1 finds "fast" slow: the slower rank counts
        seconds = {"slow": 3.0, "fast": 1.0 if rank == 0 else 9.0, "wrong": 0.5}
        log: list[tuple[str, int]] = []
        choice = tune(tuning(log, seconds), cache, TorchRanks())
        again: list[tuple[str, int]] = []
        torch.distributed.barrier()
        if case == "shared folder":
            tune(tuning(again, seconds), cache, TorchRanks())
        report = {"choice": choice, "measured": len(log), "again": len(again)}
        (Path(folder) / f"report-{case}-{rank}.json").write_text(json.dumps(report))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("case", ["shared folder", "one misses"])
def test_two_processes_agree(tmp_path: Path, case: str) -> None:
    torch.multiprocessing.spawn(rank_process, args=(str(tmp_path), case), nprocs=2)
    reports = [json.loads((tmp_path / f"report-{case}-{rank}.json").read_text()) for rank in range(2)]
    assert reports[0] == reports[1]
    assert reports[0]["choice"] == {"1": "slow", "2": "slow", "4": "slow"}
    assert reports[0]["measured"] == 9, "both tune, also the one that had a choice"
    assert reports[0]["again"] == 0
    if case == "one misses":
        assert not (tmp_path / "one misses-1").exists(), "rank 0 writes, nobody else"


class ThreadRanks:
    """Ranks as threads."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self.rank = rank, rank.rank()

    def largest(self, values: list[float]) -> list[float]:
        return [max(column) for column in zip(*self._rank.exchange(values), strict=True)]

    def from_first(self, value: Any) -> Any:
        return self._rank.exchange(value)[0]


def choices_of_two_ranks(folder: Path) -> tuple[list[dict[str, str]], int]:
    """Rank 1 finds "fast" slow and only rank 1 sees that "wrong" is wrong; (choices, files written)."""

    def work(rank: Rank) -> dict[str, str]:
        seconds = {"slow": 3.0, "fast": 1.0 if rank.rank() == 0 else 9.0, "wrong": 0.5}

        def error(tactic: str, num_tokens: int) -> float:
            return float("nan") if tactic == "wrong" and rank.rank() == 1 else 1e-3

        cache = TuningCache(folder / str(rank.rank()))
        return tune(tuning(seconds=seconds, error=error), cache, ThreadRanks(rank))

    return run_ranks(2, work), len(list(folder.rglob("*.json")))


RIGHT = [{"1": "slow", "2": "slow", "4": "slow"}] * 2, 1


def test_threads_agree_as_processes_do(tmp_path: Path) -> None:
    assert choices_of_two_ranks(tmp_path) == RIGHT


@pytest.mark.parametrize("name", ["fastest rank counts", "every rank decides", "winner not verified", "all write"])
def test_planted_mistakes_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    if name == "fastest rank counts":
        monkeypatch.setattr(
            ThreadRanks, "largest",
            lambda self, values: [min(column) for column in zip(*self._rank.exchange(values), strict=True)],
        )  # fmt: skip
    elif name == "every rank decides":
        monkeypatch.setattr(ThreadRanks, "largest", lambda self, values: values)
    elif name == "winner not verified":
        original = Tuning.__init__

        def trusting(self: Tuning, **fields: Any) -> None:
            original(self, **(fields | {"error": lambda tactic, num_tokens: 0.0}))

        monkeypatch.setattr(Tuning, "__init__", trusting)
    else:
        monkeypatch.setattr(ThreadRanks, "rank", 0, raising=False)
        monkeypatch.setattr(ThreadRanks, "__init__", lambda self, rank: setattr(self, "_rank", rank))
    assert choices_of_two_ranks(tmp_path) != RIGHT


# ---- the pass itself ----


def small_layer() -> tuple[MoeRunner, Any]:
    w13, w2 = hostile.dense_experts(8, 64, 64)
    experts = ExpertWeights(w13=Mxfp4Weight.quantize(w13), w2=Mxfp4Weight.quantize(w2))
    config = hostile.make_config(8, 64, 64, 2, num_local_experts=4, dtype=torch.float32)
    topology = Topology(ep_size=2, ep_rank=1)
    info = TorchBackend().prepare(hostile.shard(experts, ep=(2, 1)), config, topology)
    return MoeRunner(MoeBackend.TORCH, MoeA2ABackend.DEEPEP, config), (info, topology)


def test_a_recorded_pass_contains_no_dispatch_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []
    for module, name in (
        (standard, "StandardDispatcher"), (deepep, "DeepepDispatcher"),
        (mori, "MoriDispatcher"), (flashinfer, "FlashinferDispatcher"),
    ):  # fmt: skip
        for method in ("dispatch", "combine"):
            monkeypatch.setattr(getattr(module, name), method, lambda *a, m=method, **k: calls.append(m))
    for collective in ("all_reduce", "all_to_all_single", "broadcast", "barrier"):
        monkeypatch.setattr(torch.distributed, collective, lambda *a, c=collective, **k: calls.append(c))
    run = MoeRunner.run

    def recorded(self: MoeRunner, dispatched: Any, info: Any) -> Any:
        calls.append(f"run {dispatched.format}")
        return run(self, dispatched, info)

    monkeypatch.setattr(MoeRunner, "run", recorded)
    runner, (info, topology) = small_layer()

    def measure(tactic: str, num_tokens: int) -> float:
        start = time.perf_counter()
        run_locally(runner, info, DispatchFormat.DEEPEP_LL, num_tokens, topology)
        return time.perf_counter() - start

    choice = tune(tuning(tactics=("a", "b"), measure=measure), TuningCache(tmp_path), OneRank())
    assert set(choice.values()) <= {"a", "b"}
    assert calls == ["run deepep_ll"] * (2 * len(KEY.token_counts))


@pytest.mark.parametrize("num_tokens", [1, 6, 9])
def test_local_inputs_look_like_a_transports(num_tokens: int) -> None:
    runner, (_, topology) = small_layer()
    config = runner.config
    for layout in (DispatchFormat.STANDARD, DispatchFormat.FLASHINFER):
        made: Any = local_input(layout, num_tokens, config, topology)
        assert made.format is layout
        assert made.hidden_states.shape == (num_tokens, 64)
        assert made.topk_output.ids.dtype == torch.int32
        assert set(made.topk_output.ids.flatten().tolist()) <= set(range(4, 8)), "this rank's experts"
    made = local_input(DispatchFormat.DEEPEP_LL, num_tokens, config, topology)
    assert made.num_tokens is None
    assert made.hidden_states.shape[0] == 4
    assert made.hidden_states.shape[1] % 4 == 0
    assert int(made.masked_m.max()) <= made.hidden_states.shape[1]
    with pytest.raises(MoeConfigError, match="mori_ll"):
        local_input(DispatchFormat.MORI_LL, num_tokens, config, topology)
