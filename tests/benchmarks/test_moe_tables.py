"""Tables made of measurements: the fastest plan per token count, bounds between counts, entries replaced by shape."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.moe_tables import backend_entries, dump, merged, plan_entries
from moe.backends.triton.plans import PlanTable
from moe.kernels.plan import Plan
from moe.tables import read_entries
from tests.tables import rows

ROOT = Path(__file__).parents[2]

HEAD = {
    "model": "gpt-oss-20b", "format": "mxfp4", "card": "NVIDIA H100 80GB HBM3", "commit": "abc", "routing": "uniform",
}  # fmt: skip
DIRECT = Plan(is_direct=True, block_m=8, block_n_1=64, block_n_2=64, split_k=2)
GROUPED = Plan(is_direct=False, block_m=128, block_n_1=128, block_n_2=128, num_tile_heights=3)


def row(tokens: int, us: float, plan: Plan) -> dict[str, Any]:
    return HEAD | {"tokens": tokens, "us": us, "plan": dataclasses.asdict(plan)}


def entry_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    (entry,) = plan_entries(rows, "a file")
    return entry


def test_the_fastest_plan_of_each_count_serves_up_to_the_geometric_mean_with_the_next() -> None:
    slow = dataclasses.replace(DIRECT, split_k=3)
    rows = [row(4, 90, slow), row(4, 80, DIRECT), row(1024, 500, GROUPED), row(1, 30, slow)]
    entry = entry_of(rows)
    assert (entry["arch"], entry["shape"]["hidden_size"]) == ("sm90", 2880)
    steps = tuple((step["max_tokens"], Plan(**step["plan"])) for step in entry["steps"])
    assert steps == ((2, slow), (64, DIRECT), (None, GROUPED))
    assert PlanTable(steps).pick(5000) == GROUPED


def test_plans_are_chosen_by_uniform_routing_and_name_the_commits_they_were_measured_at() -> None:
    rows = [row(1, 30, DIRECT) | {"commit": "b2"}, row(1, 20, GROUPED) | {"routing": "zipf"}, row(1024, 500, GROUPED)]
    entry = entry_of(rows)
    assert [step["us"] for step in entry["steps"]] == [30, 500]
    assert entry["commit"] == "abc, b2"


def test_popular_experts_decide_among_plans_that_are_nearly_as_fast() -> None:
    tall, far, worse = (dataclasses.replace(DIRECT, block_m=rows) for rows in (16, 32, 64))
    rows = [row(16, 800, DIRECT), row(16, 823, tall), row(16, 825, far), row(16, 810, worse), row(1024, 1500, GROUPED)]
    times = (710, DIRECT), (666, tall), (600, far), (705, worse)
    zipf = [row(16, us, plan) | {"routing": "zipf"} for us, plan in times]
    (with_zipf, _), (without, _) = entry_of(rows + zipf)["steps"], entry_of(rows)["steps"]
    assert (with_zipf["us"], with_zipf["plan"]["block_m"]) == (823, 16)
    assert without["plan"]["block_m"] == 8


@rows(
    "times, best",
    ([(100, 10), (102, 9)], 1),  # the sum is larger
    ([(103, 9.8), (100, 10)], 1),  # faster with popular experts alone
    ([(102, None), (100, None), (101, None)], 1),
    ([(100, None), (102, 200)], 1),
    ([(100, None), (104, 50), (103, 200)], 2),
)
def test_the_product_of_both_times_decides_and_plans_without_one_come_last(
    times: list[tuple[float, float | None]], best: int
) -> None:
    plans = [dataclasses.replace(DIRECT, block_m=8 << n) for n in range(len(times))]
    rows = [row(1024, 500, GROUPED), *(row(4, us, plan) for plan, (us, _) in zip(plans, times, strict=True))]
    for plan, (_, us) in zip(plans, times, strict=True):
        if us is not None:
            reversed_plan = dict(reversed(dataclasses.asdict(plan).items()))  # another writer
            rows.append(row(4, us, plan) | {"routing": "zipf", "plan": reversed_plan})
    assert Plan(**entry_of(rows)["steps"][0]["plan"]) == plans[best]


def test_of_several_times_of_a_plan_the_last_counts() -> None:
    other = dataclasses.replace(DIRECT, split_k=3)
    first = [row(4, 70, DIRECT), row(4, 80, other), row(1024, 500, GROUPED)]
    again = [row(4, 90, DIRECT), row(4, 81, other) | {"commit": "b2"}]
    entry = entry_of(first + again)
    assert (entry["steps"][0]["us"], entry["steps"][0]["plan"]["split_k"], entry["commit"]) == (81, 3, "abc, b2")


@rows(
    "changed, words",
    (row(4, 80, DIRECT) | {"routing": "zipf"}, "-20b mxfp4 at 4 tokens: no plan was measured with uniform routing"),
    (row(4, 80, GROUPED) | {"card": "NVIDIA B200"}, "'NVIDIA B200' is not known: add the card to ARCHS"),
    (row(4096, 80, DIRECT), "at 4096 tokens is direct"),
)
def test_rows_without_uniform_routing_a_known_card_or_a_last_plan_are_refused(changed: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_entries([row(1024, 500, GROUPED), changed], "a file")


def test_backends_are_compared_on_the_token_counts_that_all_have() -> None:
    rows = [
        HEAD | {"routing": routing, "backend": backend, "tokens": tokens, "us": us}
        for routing, backend, tokens, us in [
            ("uniform", "triton", 1, 30.0), ("uniform", "triton", 4, 90.0), ("uniform", "flashinfer_mxfp4", 1, 70.0),
            ("zipf", "triton", 1, 1.0), ("uniform", "triton_kernels", 1, 80.0),
        ]
    ]  # fmt: skip
    (entry,) = backend_entries(rows, "a file")
    assert entry["microseconds"] == {"triton": {"1": 30.0}, "flashinfer_mxfp4": {"1": 70.0}}


def test_new_entries_replace_those_of_their_shape_and_the_file_reads_back() -> None:
    (entry,) = plan_entries([row(1024, 500, GROUPED)], "new")
    other = entry | {"format": "nvfp4"}
    smaller = entry | {"shape": entry["shape"] | {"num_experts": 8}}
    old_shape = dict(reversed(entry["shape"].items()))  # as somebody wrote it by hand
    entries = merged([entry | {"source": "old", "shape": old_shape}, other, smaller], [entry])
    assert entries == [other, smaller, entry]
    assert json.loads(dump(entries)) == {"tables": entries}


@rows("table, make", ("triton_plans.json", plan_entries), ("backends.json", backend_entries))
def test_the_shipped_tables_are_made_of_the_kept_results(table: str, make: Callable[..., list[dict[str, Any]]]) -> None:
    entries = read_entries(table)
    for source in {entry["source"] for entry in entries}:
        made = make(json.loads((ROOT / source).read_text(encoding="utf-8"))["rows"], source)
        assert all(entry in made for entry in entries if entry["source"] == source)
    assert (ROOT / "moe" / "tables" / table).read_text(encoding="utf-8") == dump(entries)
