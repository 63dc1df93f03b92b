"""Tuning policy: what is tuned, on which shapes, for how long, and that all ranks end with one verified choice."""

import dataclasses
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from moe import MoeA2ABackend, MoeBackend
from moe.errors import MoeConfigError
from moe.group import SingleRank, TorchGroup
from moe.registry import BACKEND_MODULES
from moe.tune.cache import TuneKey, TuningCache
from moe.tune.policy import MAX_TOKEN_COUNTS, Tuning, kept_choice, should_autotune, tune, tuning_token_counts
from tests.emulators.ranks import Rank, run_ranks
from tests.model.rank_threads import ThreadGroup
from tests.tables import rows

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

    def propose(num_tokens: int, measured: Mapping[str, float]) -> Sequence[str]:
        return [tactic for tactic in seconds if tactic not in measured]

    fields: dict[str, Any] = {
        "key": KEY, "propose": propose, "measure": measure,
        "error": lambda tactic, num_tokens: float("nan") if tactic == "wrong" else 1.0,
    }  # fmt: skip
    return Tuning(**(fields | changes))


def test_what_is_tuned() -> None:
    tuned = {(backend, a2a) for backend in BACKEND_MODULES for a2a in MoeA2ABackend if should_autotune(backend, a2a)}
    assert (MoeBackend.FLASHINFER_CUTEDSL, MoeA2ABackend.DEEPEP) not in tuned, "v1 has no tactics"
    assert (MoeBackend.FLASHINFER_CUTEDSL, MoeA2ABackend.NONE) in tuned
    assert (MoeBackend.FLASHINFER_CUTEDSL, MoeA2ABackend.FLASHINFER) in tuned
    assert {backend for backend, _ in tuned} == {
        MoeBackend.FLASHINFER_MXFP4, MoeBackend.FLASHINFER_CUTLASS, MoeBackend.FLASHINFER_CUTEDSL,
        MoeBackend.FLASHINFER_TRTLLM, MoeBackend.TRITON,
    }  # fmt: skip


@rows(
    "max_tokens, max_seqs, counts",
    (8, 8, (1, 2, 4, 8)),
    (12, 5, (1, 2, 4, 5, 8, 12)),
    (1, 1, (1,)),
    (4096, 1, (1, 4, 8, 32, 128, 512, 1024, 4096)),
    (512, 64, (1, 2, 4, 16, 32, 64, 256, 512)),
    (2048, 64, (1, 4, 8, 16, 64, 256, 512, 2048)),
    (3000, 77, (1, 4, 8, 32, 77, 256, 1024, 3000)),
)
def test_tuning_shapes_end_at_the_schedulers_limits(max_tokens: int, max_seqs: int, counts: tuple[int, ...]) -> None:
    assert tuning_token_counts(max_tokens, max_seqs) == counts
    with pytest.raises(MoeConfigError, match=rf"max_num_seqs is {max_tokens + 1}.*max_num_batched_tokens {max_tokens}"):
        tuning_token_counts(max_tokens, max_tokens + 1)


@rows("share", 0.0, 0.01, 0.5, 0.99, 1.0)
@rows("max_tokens", 2, 3, 100, 2048, 8192, 131072)
def test_tuning_shapes_are_few_and_spread(share: float, max_tokens: int) -> None:
    max_seqs = max(1, int(max_tokens * share))
    counts = tuning_token_counts(max_tokens, max_seqs)
    assert len(counts) <= MAX_TOKEN_COUNTS
    assert {1, max_seqs, max_tokens} <= set(counts)
    assert max(high / low for low, high in itertools.pairwise(counts)) <= 16


def test_fastest_right_tactic_wins_and_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log: list[tuple[str, int]] = []
    cache = TuningCache(tmp_path / "new" / "folder")
    assert kept_choice(KEY, cache, SingleRank()) is None
    with caplog.at_level(logging.WARNING):
        choice = tune(tuning(log), cache, SingleRank())
    assert choice == {"1": "fast", "2": "fast", "4": "fast"}
    assert log == [(tactic, count) for tactic in SECONDS for count in KEY.token_counts]
    assert "tactic wrong is off by inf" in caplog.text
    log.clear()
    assert tune(tuning(log), cache, SingleRank()) == choice
    assert not log, "a kept choice is not measured again"
    assert kept_choice(KEY, cache, SingleRank()) == choice


def test_no_right_tactic_is_an_error_and_nothing_is_kept(tmp_path: Path) -> None:
    with pytest.raises(MoeConfigError, match="no tactic stays within its tolerance at 1 tokens"):
        tune(tuning(error=lambda tactic, num_tokens: 1.01), TuningCache(tmp_path), SingleRank())
    assert not list(tmp_path.iterdir())


def test_the_budget_is_honoured_and_what_is_left_out_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log: list[tuple[str, int]] = []
    with caplog.at_level(logging.WARNING):
        choice = tune(
            tuning(log), TuningCache(tmp_path), SingleRank(), budget_s=10.0, clock=lambda: 100.0 + 2.0 * len(log)
        )
    assert log == [("slow", 1), ("slow", 2), ("slow", 4), ("fast", 1)], "eight of ten seconds, every count in turn"
    assert choice == {"1": "fast", "2": "slow", "4": "slow"}
    assert "the time for tuning is up, 5 tactics are left out (fast at 2 tokens and others)" in caplog.text


def test_without_any_time_everything_stays_untuned_but_is_checked(tmp_path: Path) -> None:
    log: list[tuple[str, int]] = []
    checked: list[tuple[str, int]] = []
    check = tuning(log, error=lambda *checking: float(checked.append(checking) or 0))
    choice = tune(check, TuningCache(tmp_path), SingleRank(), budget_s=0.0)
    assert choice == {"1": "slow", "2": "slow", "4": "slow"}, "the first proposal is the untuned way"
    assert not log
    assert checked == [("slow", count) for count in KEY.token_counts]


def test_rounds_follow_what_was_measured_and_warm_up_gets_a_share_of_the_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[tuple[str, int]] = []
    warmed: list[tuple[list[str], float]] = []

    def propose(num_tokens: int, measured: Mapping[str, float]) -> Sequence[str]:
        if not measured:
            return ["slow"]
        return ["fast", "broken"] if len(measured) == 1 else []

    def warm_up(batch: Sequence[tuple[str, int]], seconds: float) -> Sequence[tuple[str, int]]:
        warmed.append(([tactic for tactic, _ in batch], seconds))
        return [("fast", 4)] if ("fast", 4) in batch else []

    with caplog.at_level(logging.WARNING):
        choice = tune(
            tuning(log, {"slow": 3.0, "fast": 1.0, "broken": float("inf")}, propose=propose, warm_up=warm_up),
            TuningCache(tmp_path), SingleRank(), budget_s=50.0, clock=lambda: float(len(log)),
        )  # fmt: skip
    assert choice == {"1": "fast", "2": "fast", "4": "slow"}, "what is not warm is not measured"
    assert "1 tactics are left out (fast at 4 tokens" in caplog.text
    assert warmed == [(["slow"] * 3, 20.0), (["fast"] * 3 + ["broken"] * 3, 18.5)]


def test_every_field_of_the_key_changes_the_file() -> None:
    changes: dict[str, Any] = {
        "gpu": "NVIDIA H200", "library_versions": (("flashinfer-python", "0.7.3"), ("torch", "2.13.0")),
        "backend": MoeBackend.TRITON, "a2a": MoeA2ABackend.DEEPEP, "format_name": "bf16", "tp_size": 1, "ep_size": 1,
        "num_local_experts": 4, "hidden_size": 3072, "intermediate_size": 2880, "top_k": 2, "token_counts": (1, 2),
    }  # fmt: skip
    assert set(changes) == {field.name for field in dataclasses.fields(TuneKey)}
    names = {dataclasses.replace(KEY, **{field: value}).file_name for field, value in changes.items()}
    assert len(names | {KEY.file_name}) == len(changes) + 1


@rows("content", "", "not json", "[]", '{"choice": 1}', json.dumps({"choice": {"1": "fast", "2": "fast"}}))
def test_damaged_or_partial_files_are_tuned_again(tmp_path: Path, content: str) -> None:
    (tmp_path / KEY.file_name).write_text(content)
    log: list[tuple[str, int]] = []
    tune(tuning(log), TuningCache(tmp_path), SingleRank())
    assert log
    assert kept_choice(KEY, TuningCache(tmp_path), SingleRank()) is not None


def test_a_cache_without_a_folder_remembers_and_a_forgotten_choice_is_tuned_again(tmp_path: Path) -> None:
    log: list[tuple[str, int]] = []
    memory = TuningCache(None)
    assert tune(tuning(log), memory, SingleRank()) == tune(tuning(log), memory, SingleRank())
    assert len(log) == 9
    tune(tuning(), TuningCache(tmp_path), SingleRank())
    later = TuningCache(tmp_path)
    assert later.load(KEY) is not None
    later.forget(KEY)
    assert later.load(KEY) is None
    later.store(KEY, {"1": "slow", "2": "slow", "4": "slow"})
    assert TuningCache(tmp_path).load(KEY) == later.load(KEY) == {"1": "slow", "2": "slow", "4": "slow"}


def test_an_unwritable_folder_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        choice = tune(tuning(), TuningCache(blocked / "below"), SingleRank())
    assert choice["1"] == "fast"
    assert "tuned tactics are not kept" in caplog.text
    assert str(blocked) in caplog.text


def test_writers_do_not_meet_and_a_failed_one_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    partial: list[str] = []

    def replace(self: Path, target: Path) -> None:
        partial.append(self.name)
        assert json.loads(self.read_text())["choice"] == {"1": "slow"}
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", replace)
    for _ in range(2):  # as two containers that share a folder, where both have the same process id
        TuningCache(tmp_path).store(KEY, {"1": "slow"})
    assert len(set(partial)) == 2
    assert not list(tmp_path.iterdir())


# ---- several ranks ----


def rank_process(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        for case in ("shared folder", "one misses"):
            tune_twice(rank, folder, case)
    finally:
        torch.distributed.destroy_process_group()


def tune_twice(rank: int, folder: str, case: str) -> None:
    cache = TuningCache(Path(folder) / (f"{case}-{rank}" if case == "one misses" else case))
    if case == "one misses" and rank == 0:
        cache.store(KEY, {"1": "slow", "2": "slow", "4": "slow"})
    # rank 1 finds "fast" slow: the slower rank counts
    seconds = {"slow": 3.0, "fast": 1.0 if rank == 0 else 9.0, "wrong": 0.5}
    log: list[tuple[str, int]] = []
    choice = tune(tuning(log, seconds), cache, TorchGroup())
    again: list[tuple[str, int]] = []
    torch.distributed.barrier()
    if case == "shared folder":
        tune(tuning(again, seconds), cache, TorchGroup())
    report = {"choice": choice, "measured": len(log), "again": len(again)}
    (Path(folder) / f"report-{case}-{rank}.json").write_text(json.dumps(report))


@pytest.mark.processes
def test_two_processes_agree(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank_process, args=(str(tmp_path),), nprocs=2)
    for case in ("shared folder", "one misses"):
        reports = [json.loads((tmp_path / f"report-{case}-{rank}.json").read_text()) for rank in range(2)]
        assert reports[0] == reports[1]
        assert reports[0]["choice"] == {"1": "slow", "2": "slow", "4": "slow"}
        assert reports[0]["measured"] == 9, "both tune, also the one that had a choice"
        assert reports[0]["again"] == 0
    assert not (tmp_path / "one misses-1").exists(), "rank 0 writes, nobody else"


def test_rank_0_watches_the_clock_and_what_is_cold_on_any_rank_is_left_out(tmp_path: Path) -> None:
    """Ranks that decided for themselves would wait for each other for ever."""

    def work(rank: Rank) -> tuple[dict[str, str], list[tuple[str, int]]]:
        log: list[tuple[str, int]] = []
        now_s = itertools.count(0.0, 1.0 if rank.rank() == 0 else 100.0)
        cold = [("fast", 2)] if rank.rank() == 1 else []
        mine = tuning(log, warm_up=lambda batch, seconds: cold)
        choice = tune(mine, TuningCache(tmp_path), ThreadGroup(rank), budget_s=10.0, clock=lambda: next(now_s))
        return choice, log

    (choice, log), other = run_ranks(2, work)
    assert other == (choice, log)
    assert log == [("slow", 1), ("slow", 2), ("slow", 4), ("fast", 1), ("fast", 4), ("wrong", 1)]
    assert choice == {"1": "fast", "2": "slow", "4": "fast"}


def test_all_ranks_remember_what_rank_0_alone_writes(tmp_path: Path) -> None:
    """Layers of one shape are measured once on ranks that share no folder, too."""

    def work(rank: Rank) -> tuple[int, int]:
        log: list[tuple[str, int]] = []
        cache = TuningCache(tmp_path / str(rank.rank()))
        tune(tuning(log), cache, ThreadGroup(rank))
        num_first = len(log)
        tune(tuning(log), cache, ThreadGroup(rank))
        return num_first, len(log)

    assert run_ranks(2, work) == [(9, 9)] * 2
    assert [path.parent.name for path in tmp_path.rglob("*.json")] == ["0"]


def test_threads_agree_as_processes_do(tmp_path: Path) -> None:
    """Rank 1 finds "fast" slow, and only rank 1 sees that "wrong" is wrong; rank 0 alone writes."""

    def work(rank: Rank) -> dict[str, str]:
        seconds = {"slow": 3.0, "fast": 1.0 if rank.rank() == 0 else 9.0, "wrong": 0.5}

        def error(tactic: str, num_tokens: int) -> float:
            return float("nan") if tactic == "wrong" and rank.rank() == 1 else 1e-3

        cache = TuningCache(tmp_path / str(rank.rank()))
        return tune(tuning(seconds=seconds, error=error), cache, ThreadGroup(rank))

    assert run_ranks(2, work) == [{"1": "slow", "2": "slow", "4": "slow"}] * 2
    assert len(list(tmp_path.rglob("*.json"))) == 1
