"""The search of launch plans on a CPU: what is left out, what a row says, and that no process stops another."""

import dataclasses
import json
import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from benchmarks import bench_moe, moe_groups, moe_sweep, moe_tables
from benchmarks.moe_cases import CASES, random_experts
from benchmarks.moe_groups import Group
from benchmarks.moe_sweep import GroupSearch, SearchSettings, search_batch
from moe.check.reference import reference_moe
from moe.kernels.plan import Plan
from moe.routing import StandardTopK
from tests.benchmarks import fake_searches
from tests.tables import rows

CASE = dataclasses.replace(
    CASES["gpt-oss-20b"], num_experts=8, top_k=2, hidden_size=64, intermediate_size=64, num_active={}
)
SETTINGS = SearchSettings(kinds=["uniform"], num_sets=3, seed=5, device="cpu")
GROUP = Group(model="tiny", format_name="mxfp4", tokens=(1, 40), num_sets=3)
TRIED = [plan for tokens in GROUP.tokens for plan in moe_sweep.candidates(CASE, tokens, "mxfp4")]


class FakeTimer:
    """Runs the plan on every copy and says how many id sets it was given."""

    seen: ClassVar[list[int]] = []

    def __init__(self, contender: Any, x_TH: torch.Tensor, staged: list[Any], num_copies: int) -> None:
        self.seen.append(num_copies)
        for copy in range(num_copies):
            contender.run(copy, x_TH, staged[0])

    def us(self, staged: list[Any]) -> float:
        return 10.004 * len(staged)


class Card:
    """Stands in for the kernels: computes with the twin, except where a plan is told to break."""

    def __init__(self) -> None:
        self.experts = random_experts(CASE, "mxfp4", torch.device("cpu"), seed=0)
        self.wrong: Any = lambda plan: False
        self.too_large: Any = lambda plan: False
        self.layers: set[int] = set()

    def run_layer(
        self, x_TH: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: Any, plan: Plan, out: torch.Tensor
    ) -> None:
        if self.too_large(plan):
            raise RuntimeError("out of resource: shared memory")
        self.layers.add(layer.w13.data.data_ptr())
        out.copy_(reference_moe(x_TH, StandardTopK(weights, ids), self.experts, CASE.activation))
        if self.wrong(plan):
            out[-1] *= 1.5


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setitem(moe_groups.CASES, "tiny", CASE)
    monkeypatch.setattr(moe_sweep, "run_layer", card.run_layer)
    monkeypatch.setattr(moe_sweep, "Timer", FakeTimer)
    monkeypatch.setattr(FakeTimer, "seen", [])
    return card


Rows = list[dict[str, Any]]


def searched(settings: SearchSettings = SETTINGS) -> tuple[GroupSearch, Rows]:
    search = GroupSearch(GROUP, settings)
    search.prepare()
    search.compile()
    return search, list(search.rows())


def test_a_row_per_plan_says_what_tables_are_made_of(card: Card) -> None:
    search, rows = searched()
    assert search.failures == []
    for tokens in GROUP.tokens:
        plans = [Plan(**row["plan"]) for row in rows if row["tokens"] == tokens]
        assert plans == moe_sweep.candidates(CASE, tokens, "mxfp4")
    row = rows[0]
    assert (row["model"], row["format"], row["backend"], row["routing"]) == ("tiny", "mxfp4", "triton", "uniform")
    assert (row["active_experts"], row["us"]) == (2, 30.01)
    assert row["error"] < 0.01
    assert row["floor_us"] >= 0
    assert set(FakeTimer.seen) == {8}
    assert len(card.layers) == 8  # so small a layer is copied


def test_every_kind_of_routing_is_timed(card: Card) -> None:
    _, rows = searched(dataclasses.replace(SETTINGS, kinds=["uniform", "zipf"]))
    assert [row["routing"] for row in rows] == ["uniform", "zipf"] * (len(rows) // 2)
    assert len(FakeTimer.seen) == len(rows) // 2  # one graph serves both


def test_a_wrong_plan_has_no_row_and_is_told(card: Card, capsys: pytest.CaptureFixture[str]) -> None:
    card.wrong = lambda plan: plan.num_stages_1 == 3
    search, rows = searched()
    assert [Plan(**row["plan"]) for row in rows] == [plan for plan in TRIED if not card.wrong(plan)]
    reasons = [failure["reason"] for failure in search.failures]
    assert capsys.readouterr().out.count("wrong: tiny mxfp4") == len(reasons) == len(TRIED) - len(rows) > 0
    assert "not what the twin computes" in reasons[0]
    assert reasons[0].startswith("is_direct=True block_m=8 block_n_1=64 block_n_2=64 num_stages_1=3 ")


@rows("is_timed", False, True)
def test_a_plan_that_breaks_is_left_out_with_one_line(
    card: Card, capsys: pytest.CaptureFixture[str], is_timed: bool
) -> None:
    search = GroupSearch(GROUP, SETTINGS)
    search.prepare()
    card.too_large = lambda plan: plan.num_stages_1 == 6 and not is_timed
    search.compile()
    card.too_large = lambda plan: plan.num_stages_1 == 6
    assert [Plan(**row["plan"]) for row in search.rows()] == [plan for plan in TRIED if not card.too_large(plan)]
    assert search.failures == []
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(map(card.too_large, TRIED)) > 0
    assert all(line.startswith("left out: tiny mxfp4 ") and "shared memory" in line for line in lines)


def test_a_number_of_tokens_without_any_plan_is_a_failure(card: Card) -> None:
    card.too_large = lambda plan: plan.is_direct
    search, rows = searched()
    assert {row["tokens"] for row in rows} == {40}
    [failure] = search.failures
    assert (failure["tokens"], failure["reason"]) == (1, "no plan launches and is right")


def in_process(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Messages of a process whose turn comes at once."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # of this process they shall stay
    ours, theirs = multiprocessing.Pipe()
    semaphore = multiprocessing.get_context("spawn").Semaphore(1)
    ours.send("your turn")
    moe_sweep.search_in_process(GROUP, SETTINGS, theirs, semaphore)
    assert semaphore.acquire(timeout=0)  # another may prepare
    messages = []
    while ours.poll(0):
        messages.append(ours.recv())
    return messages


def test_a_process_says_when_it_has_compiled_and_then_sends_rows(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, (rows, failures) = in_process(monkeypatch)
    assert compiled is None
    assert len(rows) == len(FakeTimer.seen) > 0
    assert failures == []


def test_a_process_that_cannot_prepare_says_why(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*arguments: Any) -> Any:
        raise MemoryError("too many layers")

    monkeypatch.setattr(moe_sweep.moe_contenders, "prepare", prepare)
    (message,) = in_process(monkeypatch)
    assert message.startswith("MemoryError: too many layers (")


def test_a_process_whose_parent_has_gone_ends(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    moe_sweep.search_in_process(GROUP, SETTINGS, theirs, multiprocessing.get_context("spawn").Semaphore(1))
    assert FakeTimer.seen == []


def searches(*models: str) -> tuple[Rows, Rows]:
    settings: Any = SimpleNamespace(kinds=["uniform"])
    groups: list[Any] = [fake_searches.FakeGroup(model) for model in models]
    return search_batch(groups, settings, fake_searches.work)


def test_turns_come_after_all_have_compiled_and_never_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    rows, failures = searches("a", "b", "c")
    assert [row["model"] for row in rows] == ["a", "b", "c"]
    assert {failure["reason"] for failure in failures} == {"one plan was wrong"}
    assert max(row["compiled"] for row in rows) < min(row["begin"] for row in rows)
    assert rows[0]["end"] < rows[1]["begin"]
    assert rows[1]["end"] < rows[2]["begin"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": compiled in ")[0] for line in lines] == ["a mxfp4 1,4", "b mxfp4 1,4", "c mxfp4 1,4"]
    assert all(line.endswith("1 plans timed in 0 s") for line in lines)


def test_processes_that_die_fail_or_hang_cost_their_own_rows_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(moe_sweep, "LONGEST_TIMING_S", 0.5)
    rows, failures = searches("dies", "fails", "dies late", "hangs late", "good")
    assert [row["model"] for row in rows] == ["good"]
    assert {failure["model"]: failure["reason"] for failure in failures} == {
        "dies": "its process ended with exit code 3",
        "fails": "RuntimeError: no memory",
        "dies late": "its process ended with exit code 4",
        "hangs late": "not timed after 0 s",
        "good": "one plan was wrong",
    }
    assert failures[0]["tokens"] == [1, 4]
    assert "dies mxfp4 1,4: its process ended" in capsys.readouterr().out
    monkeypatch.setattr(moe_sweep, "LONGEST_COMPILE_S", 0.0)
    rows, failures = searches("hangs")
    assert (rows, [failure["reason"] for failure in failures]) == ([], ["not compiled after 0 s"])
    assert multiprocessing.active_children() == []


def test_the_command_writes_a_document_that_plan_tables_are_made_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[list[Group]] = []

    def search(groups: list[Group], settings: SearchSettings) -> tuple[Rows, Rows]:
        taken.append(groups)
        assert settings.device == "cuda"
        rows = [
            {"model": group.model, "format": group.format_name, "tokens": tokens, "routing": "uniform",
             "plan": dataclasses.asdict(plan), "us": 1.0 + us}
            for group in groups
            for tokens in group.tokens
            for us, plan in enumerate(moe_sweep.candidates(group.case, tokens, group.format_name))
        ]  # fmt: skip
        return rows, [moe_sweep.failure(groups[0], "one died")]

    monkeypatch.setattr(bench_moe, "search_batch", search)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * 10**9, 10**11))
    out = tmp_path / "sweep.json"
    command = "bench_moe --sweep --models gpt-oss-120b,deepseek-v3-quarter --formats mxfp4,fp8_block --tokens 1024,1"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--commit", "abc", "--out", str(out)])
    bench_moe.main()
    layers = {(group.model, group.format_name) for groups in taken for group in groups}
    assert layers == {("gpt-oss-120b", "mxfp4"), ("deepseek-v3-quarter", "fp8_block")}
    document = json.loads(out.read_text())
    entries = moe_tables.plan_entries(document["rows"], "here")
    heads = [(entry["format"], entry["card"], entry["commit"], len(entry["steps"])) for entry in entries]
    assert heads == [("mxfp4", "NVIDIA H200", "abc", 2), ("fp8_block", "NVIDIA H200", "abc", 2)]
    assert len(document["failures"]) == len(taken)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["num_rows"], last["environment"]["num_sets"]) == (len(document["rows"]), 6)
