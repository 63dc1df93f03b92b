"""The measuring loop of the MoE benchmark on a CPU: what is checked before a row exists, and what a failure costs."""

import dataclasses
import os
from typing import Any, ClassVar

import pytest
import torch

from benchmarks import moe_contenders, moe_measure, moe_warm
from benchmarks.bench_moe import arguments
from benchmarks.moe_cases import CASES, GPT_OSS
from benchmarks.moe_contenders import Contender
from benchmarks.moe_measure import LayerBench, Settings
from benchmarks.moe_timing import copies_needed
from moe.backends.flashinfer.profiles import NO_PROFILES, Profiles
from moe.check.reference import reference_moe
from moe.formats import ExpertWeights
from moe.routing import StandardTopK
from moe.tune.cache import TuningCache
from tests.tables import rows

CPU = torch.device("cpu")
CASE = dataclasses.replace(
    CASES["gpt-oss-20b"], num_experts=4, top_k=2, hidden_size=64, intermediate_size=64, num_active={}
)


class FakeTimer:
    """Runs the contender once per set, as a graph would, and says one microsecond."""

    seen: ClassVar[list[tuple[str, int, int]]] = []

    def __init__(self, contender: Contender, x_TH: torch.Tensor, staged: list[Any], num_copies: int) -> None:
        self.contender, self.x_TH, self.num_copies = contender, contender.tokens(x_TH), num_copies

    def us(self, staged: list[Any]) -> float:
        for routing in staged:
            self.contender.run(self.num_copies - 1, self.x_TH, routing)
        self.seen.append((self.contender.name, len(staged), self.num_copies))
        return 1.0


class Twin(Contender):
    """Computes with the twin, then does `harm` to the result."""

    def __init__(self, experts: ExpertWeights, harm: Any, is_ours: bool) -> None:
        super().__init__("twin", experts)
        self.harm, self.is_ours = harm, is_ours

    def run(self, copy: int, x_TH: torch.Tensor, routing: StandardTopK) -> torch.Tensor:
        out_TH = reference_moe(x_TH, routing, self.layers[copy], CASE.activation)
        return out_TH if self.harm is None else self.harm(out_TH)

    def choose(self, measure: Any) -> None:
        measure()


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_measure, "Timer", FakeTimer)
    monkeypatch.setattr(FakeTimer, "seen", [])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**9))


def harmed(monkeypatch: pytest.MonkeyPatch, harm: Any = None, is_ours: bool = False, **changes: Any) -> LayerBench:
    """Measures `Twin`; `triton_kernels` cannot be prepared."""

    def prepare(name: str, case: Any, experts: ExpertWeights, device: torch.device) -> Twin:
        if name == "triton_kernels":
            raise ModuleNotFoundError("not here")
        return Twin(experts, harm, is_ours)

    monkeypatch.setitem(moe_contenders.FORMATS, "twin", ("mxfp4",))
    monkeypatch.setattr(moe_contenders, "prepare", prepare)
    settings = {
        "tokens": [5], "backends": ["twin"], "kinds": ["uniform", "zipf"], "num_sets": 6, "tune_seconds": 0, "seed": 3,
    }  # fmt: skip
    return LayerBench(case=CASE, format_name="mxfp4", settings=Settings(**settings | changes), device=CPU)


def test_a_row_per_tokens_and_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = harmed(monkeypatch, tokens=[1, 5])
    rows = list(layer.rows())
    assert layer.failures == []
    assert [(row["tokens"], row["routing"]) for row in rows] == [
        (1, "uniform"), (1, "zipf"), (5, "uniform"), (5, "zipf")
    ]  # fmt: skip
    assert all(row["error"] < 1e-6 and row["us"] == 1.0 and row["floor_us"] >= 0 for row in rows)
    assert {"model", "format", "backend", "plan", "tuned", "active_experts"} <= set(rows[0])
    assert FakeTimer.seen == [("twin", num_sets, 8) for num_sets in (4, 6, 6)] * 2, (
        "other choices are measured on few sets before the row, and so small a layer would stay in the L2"
    )


def test_a_contender_that_cannot_be_prepared_costs_its_own_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = harmed(monkeypatch, backends=["triton_kernels", "flashinfer_cutlass", "twin"])
    assert [row["backend"] for row in layer.rows()] == ["twin"] * 2  # flashinfer_cutlass takes no MXFP4
    assert [(failure["backend"], failure["tokens"]) for failure in layer.failures] == [("triton_kernels", None)]


def test_a_backend_of_the_service_is_called_through_its_runner() -> None:
    experts = moe_measure.random_experts(CASE, "mxfp4", CPU, seed=0)
    contender = moe_contenders.prepare("torch", CASE, experts, CPU)
    x_TH, (topk,) = torch.randn(3, 64).bfloat16(), moe_measure.id_sets(CASE, 3, "uniform", CPU, 1)
    got = contender.run(0, contender.tokens(x_TH), contender.stage(topk))
    want = reference_moe(x_TH, topk, experts, GPT_OSS)
    assert float((got.float() - want).norm() / want.norm()) < 0.01
    with pytest.raises(ValueError, match="no tensors"):  # its processed weights are no plain records
        _ = contender.nbytes


@dataclasses.dataclass(frozen=True)
class Tunable:
    """A quant info that tuning gives profile numbers to."""

    profiles: Profiles = NO_PROFILES


def test_rivals_are_tuned_and_ours_keeps_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = moe_measure.random_experts(CASE, "mxfp4", CPU, seed=0)
    contender = moe_contenders.prepare("torch", CASE, experts, CPU)
    assert contender.is_tuned(4) is None
    seen: dict[str, Any] = {}

    def tune_layer(runner: Any, info: Any, experts: ExpertWeights, **arguments: Any) -> Tunable:
        seen.update(arguments)
        return Tunable(Profiles(((4, (2, 3)),)))

    monkeypatch.setattr(moe_contenders, "tune_layer", tune_layer)
    contender.layers = [Tunable()]
    assert (contender.is_tuned(4), contender.plan(4)) == (False, None)
    contender.is_ours = True
    contender.tune(experts, [1, 4], TuningCache(None), 20.0)
    assert seen == {}
    contender.is_ours = False
    contender.tune(experts, [1, 4], TuningCache(None), 20.0)
    assert (contender.is_tuned(4), contender.plan(4)) == (True, (2, 3))
    assert (seen["token_counts"], seen["budget_s"]) == ([1, 4], 20.0)


@rows(
    "harm, reason",
    (lambda out: out * 1.02, "not what the twin computes"),
    (lambda out: out.index_add(0, torch.tensor([4]), 0.06 * out[4:5]), "not what the twin computes"),
    (lambda out: out.index_fill(0, torch.tensor([4]), float("nan")), "nothing wrote"),
    (torch.empty_like, "nothing wrote"),
    (lambda out: out.index_fill(0, torch.tensor([2]), 1.0), "not what the twin computes"),
)
def test_wrong_results_give_no_row(monkeypatch: pytest.MonkeyPatch, harm: Any, reason: str) -> None:
    layer = harmed(monkeypatch, harm)
    assert list(layer.rows()) == []
    assert reason in layer.failures[0]["reason"]


def test_our_bits_must_not_change_from_run_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(out: torch.Tensor) -> torch.Tensor:
        return out * (1 + 1e-4 * torch.rand(()))

    layer = harmed(monkeypatch, noisy, is_ours=True)
    assert list(layer.rows()) == []
    assert "two runs" in layer.failures[0]["reason"]
    assert len(list(harmed(monkeypatch, noisy).rows())) == 2  # a rival's may


def test_a_rotation_holds_enough_bytes_and_no_more_copies_than_useful() -> None:
    assert [copies_needed(num_bytes) for num_bytes in (53e6, 150e6, 1e9)] == [8, 3, 2]


@rows(
    "argv",
    ["--models", "gpt-5"], ["--backends", "cutlass"], ["--routing", "even"], ["--sweep", "--compile"],
    ["--sweep", "--backends", "triton,triton_kernels"], ["--sweep", "--tune-seconds", "3"],
)  # fmt: skip
def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str], argv: Any) -> None:
    with pytest.raises(SystemExit):
        arguments(argv)
    assert argv[0] in capsys.readouterr().err


def test_a_search_needs_no_other_option() -> None:
    options = ["--sweep", "--sets", "4", "--routing", "zipf", "--backends", "triton"]
    default, bare, full = (arguments(argv) for argv in ([], ["--sweep"], options))
    assert (len(default.backends), default.routing, default.sets) == (6, ["uniform", "zipf"], 20)
    assert (bare.backends, bare.routing, bare.sets) == (["triton"], ["uniform", "zipf"], 6)
    assert (full.backends, full.routing, full.sets) == (["triton"], ["zipf"], 4)


def test_a_job_compiles_by_one_call_and_tells_why_it_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(moe_warm.CASES, "tiny", CASE)
    job = moe_warm.Job(model="tiny", format_name="mxfp4", backend="torch", tokens=2, device="cpu")
    assert moe_warm.compile_one(job) is None
    assert "deep_gemm" in str(moe_warm.compile_one(dataclasses.replace(job, backend="deep_gemm")))


def test_what_jobs_complain_of_and_processes_that_die_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    moe_warm.in_processes(str, ["first", "", "third"], 1)
    assert sorted(capsys.readouterr().out.split()) == ["first", "third"]
    moe_warm.in_processes(os._exit, [3], 4)
    assert capsys.readouterr().out.startswith("BrokenProcessPool: ")
    moe_warm.in_processes(str, [], 4)
    assert capsys.readouterr().out == ""
