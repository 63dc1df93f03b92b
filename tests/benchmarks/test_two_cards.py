"""`scripts/two_cards.py` and `benchmarks/ranks_one_card.py` as far as a CPU runs them: parts, resuming, comparing."""

import itertools
import json

import pytest
import torch

from benchmarks import bench_exchange, bench_sums, ranks_one_card
from moe.group import SingleRank
from scripts import two_cards
from scripts.card_end_to_end import ServiceError
from tests.engine.emulated_rank_worker import WIDE, install
from tests.tables import rows

ON_CPU = ["--backend", "torch", "--device", "cpu", "--items", "9", "--streams", "2", "--answer-tokens", "8"]


def test_parts_begin_with_the_build_and_with_one_rank(tmp_path):
    args = two_cards.parse(["--out", str(tmp_path), "--models", "tiny", "--layouts", "tp2,one", "--deepep-source", "x"])
    assert two_cards.parts_of(args) == ["deepep", "sums", "exchange", "tiny/one", "tiny/tp2"]
    assert len(two_cards.parts_of(two_cards.parse(["--out", str(tmp_path)]))) == 2 + len(two_cards.MODELS) * len(
        two_cards.LAYOUTS
    )


def run(tmp_path, capsys, layouts, *flags):
    status = two_cards.main(["--out", str(tmp_path), "--models", "tiny", "--layouts", layouts, *flags])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_parts_are_resumed_and_those_that_differ_fail(tmp_path, capsys, monkeypatch):
    asked = []

    def run_part(out, args, model, layout, *, one_shot):
        asked.append(layout)
        if layout == "tp2" and len(asked) == 2:
            raise ServiceError("a rank did not start")
        top = {"a": -1.0, "b": -2.0 - 0.3 * (layout == "ep2")}  # 0.135 and 0.1
        return {"first_tokens": [{"text": "a", "top": top}]}

    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr(two_cards, "run_part", run_part)
    monkeypatch.setattr(two_cards, "evals", lambda *flags: {"agreement": 1.0, "passed": True})
    monkeypatch.setattr(two_cards.time, "monotonic", lambda: next(clock))
    status, last = run(tmp_path, capsys, "one,tp2,ep2", "--device", "cpu", "--seconds", "240")
    assert (status, last["left"]) == (two_cards.MORE_TO_DO, ["tiny/ep2"])
    assert json.loads((tmp_path / "report.json").read_text())["not_run"] == ["tiny/ep2"]
    status, last = run(tmp_path, capsys, "one,tp2,ep2", "--device", "cpu")
    assert (status, last["left"], last["failed"]) == (1, [], ["tiny/tp2", "tiny/ep2"])
    assert asked == ["one", "tp2", "ep2"], "nothing is measured twice"
    report = json.loads((tmp_path / "report.json").read_text())
    parts = report["parts"]
    assert report["not_run"] == []
    assert parts["tiny/tp2"]["error"] == "a rank did not start"
    assert parts["tiny/ep2"]["probability_difference"] == 0.0351
    assert not parts["tiny/ep2"]["same_as_one_rank"]


@rows("is_right", True, False)
def test_services_run_without_one_shot_sums_where_these_are_wrong(tmp_path, capsys, monkeypatch, is_right):
    def measure_sums():
        if not is_right:
            raise ServiceError("a sum is wrong")
        return {"reaches_target": True}

    seen = []

    def service(log, *flags):
        seen.append(two_cards.WITHOUT_ONE_SHOT in flags)
        raise ServiceError("stops here")

    monkeypatch.setattr(two_cards, "measure_sums", measure_sums)
    monkeypatch.setattr(two_cards, "measure_exchange", lambda device: {"rows": []})
    monkeypatch.setattr(two_cards, "service", service)
    status, last = run(tmp_path, capsys, "one,tp2-nccl")
    assert (status, last["failed"][0]) == (1, "tiny/one" if is_right else "sums")
    assert seen == [not is_right, True]


@pytest.mark.ranks
def test_sums_are_measured_by_the_program_that_compares_them(capfd, monkeypatch):
    """On a CPU there is no kernel to compare, and both ways are gloo."""
    monkeypatch.setattr("sys.argv", ["bench_sums", "--device", "cpu", "--tokens", "2", "--hidden", "8"])
    bench_sums.main()
    last = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert not last["one_shot_works"]
    found = [(row["bytes"], row["plain_us"] > 0, row["wrong_sums"], row["wrong_norms"]) for row in last["rows"]]
    assert found == [(32, True, 0, 0)]


class LateRank(SingleRank):
    """Sums what the buffer holds a write later, as a rank would that does not wait for the others."""

    def __init__(self):
        self._parts = []

    def all_reduce(self, x):
        self._parts.append(x.clone())
        return self._parts[-2] if len(self._parts) > 1 else x


@rows("count", bench_sums.count_wrong_sums, bench_sums.count_wrong_norms)
def test_sums_that_follow_each_other_are_compared(count):
    for group, wrong in ((SingleRank(), 0), (LateRank(), bench_sums.SUMS_PER_GRAPH - 1)):
        assert count(group, SingleRank(), (1, 8), torch.device("cpu")) == wrong


def exchange_with_emulated_deepep(rank, args, meeting):
    install(pytest.MonkeyPatch(), WIDE)
    bench_exchange.EXCHANGES_PER_GRAPH = 1
    bench_exchange.work(rank, args, meeting)


@pytest.mark.ranks
def test_dispatch_and_combine_are_timed_after_a_check(tmp_path, capfd):
    args = bench_exchange.parse(["--device", "cpu", "--shapes", "small", "--tokens", "1,4"])
    torch.multiprocessing.spawn(exchange_with_emulated_deepep, args=(args, tmp_path / "meet"), nprocs=2)
    last = json.loads(capfd.readouterr().out.splitlines()[-1])
    found = [(row["transport"], row["tokens"]) for row in last["rows"] if row["us"] > 0 and row["error"] < 0.01]
    assert found == list(itertools.product(("none", "normal", "low_latency"), (1, 4)))


@rows("flags", ["--models", "gpt5"], ["--layouts", "tp3"])
def test_what_is_unknown_is_refused(tmp_path, flags):
    with pytest.raises(SystemExit):
        two_cards.parse(["--out", str(tmp_path), *flags])


@pytest.mark.ranks
@pytest.mark.timeout(400)
def test_the_bundled_model_on_two_ranks_of_a_cpu(tmp_path, capsys):
    status = two_cards.main(["--out", str(tmp_path), "--models", "tiny", "--layouts", "one,ep2", *ON_CPU])
    assert status == 0, capsys.readouterr().out
    row = json.loads((tmp_path / "report.json").read_text())["parts"]["tiny/ep2"]
    assert row["paths"] == {"torch / none / mxfp4": 6}
    assert row["agreement"] == 1.0
    [measured] = row["bench"]
    assert measured["decode_tokens_per_s"] > 0
    assert (measured["streams"], measured["prompt_tokens"], measured["answer_tokens"]) == (2, 1000, 8)
    assert row["killed_rank_seconds"] < 30


@pytest.mark.ranks
@pytest.mark.timeout(400)
def test_two_ranks_that_share_a_device(tmp_path, capsys, monkeypatch):
    kept = {name: flags for name, flags in ranks_one_card.LAYOUTS.items() if name in ("one", "dp2-ep2-eplb")}
    monkeypatch.setattr(ranks_one_card, "LAYOUTS", kept)
    flags = ["--out", str(tmp_path), "--device", "cpu", "--backends", "torch", "--items", "18"]
    assert ranks_one_card.main(flags) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["name"] for row in last["rows"]] == ["torch-one", "torch-dp2-ep2-eplb"]
    assert last["rows"][1]["agreement"] == 1.0
