"""`evals matrix`: which cells are final, which are tried again, and the exit status. Its servers are stand-ins."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from evals import matrix
from evals.__main__ import main
from evals.client import Client, ServerError
from evals.distributions import Place, Scores
from evals.results import Item
from evals.servers import StartRefused
from evals.texts import Sequence
from tests.tables import rows

FIGURES = {
    "device": "cuda", "right": 1, "items": 1, "same_answer": 1, "p": 1.0, "top1_agreement": 1.0,
    "kl_lower_bound": {"mean": 0.0, "p99": 0.0},
}  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Runs two cells, torch and triton; `starts` and `measures` name the backends whose server does so.

    `error` is that of a server that does not start.
    """

    def run(
        folder: Path, starts: list[str], measures: list[str], error: type[ServerError] = StartRefused
    ) -> tuple[int, dict]:
        tried = []

        @contextmanager
        def serving(command, log):
            tried.append(backend := command[command.index("--moe-backend") + 1])
            if backend not in starts:
                raise error("refused")
            yield "http://127.0.0.1:9/v1"

        def measured(self, cell, url):
            if cell.backend not in measures:
                raise ServerError("the engine died")
            return dict(FIGURES)

        monkeypatch.setattr(matrix, "serving", serving)
        monkeypatch.setattr(matrix.Matrix, "_measured", measured)
        argv = ["evals", "matrix", "--backends", "torch,triton", "--kv", "bfloat16", "--launches", "eager"]
        out = folder / "matrix.json"
        monkeypatch.setattr(sys, "argv", [*argv, "--ranks", "1", "--out", str(out)])
        status = main()
        cells = json.loads(out.read_text())["cells"] if out.exists() else {}
        return status, {"tried": tried, "kept": sorted(cell["backend"] for cell in cells.values())}

    return run


@rows(
    "starts, measures, status, tried, kept",
    (["torch", "triton"], ["torch", "triton"], 0, ["torch", "triton"], ["torch", "triton"]),
    (["torch"], ["torch"], 0, ["torch", "triton"], ["torch", "triton"]),
    ([], [], 2, ["torch"], ["torch", "triton"]),  # not one cell runs
    (["torch", "triton"], ["torch"], 1, ["torch", "triton"], ["torch"]),
    (["torch", "triton"], [], 1, ["torch"], []),  # without its reference a cell waits
)
def test_a_cell_whose_server_failed_after_ready_stays_open(run, tmp_path, starts, measures, status, tried, kept):
    assert run(tmp_path, starts, measures) == (status, {"tried": tried, "kept": kept})
    again = [backend for backend in ("torch", "triton") if backend not in kept]
    assert run(tmp_path, ["torch", "triton"], ["torch", "triton"])[1] == {"tried": again, "kept": ["torch", "triton"]}


@rows("starts, tried, kept", ([], ["torch"], []), (["torch"], ["torch", "triton"], ["torch"]))
def test_a_start_that_failed_for_another_reason_than_its_settings_is_tried_again(run, tmp_path, starts, tried, kept):
    """Such as a full card. It was kept forever, and with it every cell that is compared with it."""
    everything = ["torch", "triton"]
    assert run(tmp_path, starts, everything, ServerError) == (1, {"tried": tried, "kept": kept})
    again = [backend for backend in everything if backend not in kept]
    assert run(tmp_path, everything, everything) == (0, {"tried": again, "kept": everything})


MODELS = ["gpt-v1.1", "gpt-v1.2", "a/b", "a_b"]


def run_models(monkeypatch, out, models):
    """Runs the reference and one more cell of each model, whose server tells its answers apart from the others'."""
    asked = []

    @contextmanager
    def serving(command, log):
        asked.append(command[command.index("--model") + 1])
        yield "http://127.0.0.1:9/v1"

    def evaluate(client, category, items, options, concurrency):
        return [Item(id="1", category="facts", prompt="", answer=asked[-1], score=1.0)], 1

    def score(client, sequences, concurrency):
        return Scores(model="served", sequences=sequences, places=[[Place(logprob=-1.0, top={"7": -1.0})]])

    answers = {"/models": {"data": [{"id": "served"}]}}
    engine = {"device": "cuda", "dtype": "bfloat16", "moe_paths": []}
    monkeypatch.setattr(Client, "get", lambda self, path, body=None: answers.get(path, {"engine": engine}))
    monkeypatch.setattr(matrix, "serving", serving)
    monkeypatch.setattr(matrix, "score", score)
    monkeypatch.setattr(matrix.tiny, "evaluate", evaluate)
    monkeypatch.setattr(
        matrix.texts, "from_questions", lambda client, count, _: [Sequence(ids=[1, 10 + MODELS.index(asked[-1])])]
    )
    flags = ["--backends", "torch,triton", "--kv", "bfloat16", "--launches", "eager", "--ranks", "1", "--items", "1"]
    monkeypatch.setattr(sys, "argv", ["evals", "matrix", *flags, "--models", ",".join(models), "--out", str(out)])
    status = main()
    return status, json.loads(out.read_text())["cells"]


def test_each_model_has_a_reference_of_its_own(monkeypatch, tmp_path):
    """Those of models whose names differ after a dot or by a slash were one file."""
    for models in [MODELS[:1], MODELS[1:2], MODELS]:
        status, cells = run_models(monkeypatch, tmp_path / "run-v1.2.json", models)
        assert status == 0
    assert len(cells) == 2 * len(MODELS)
    assert all(cell["figures"]["same_answer"] == 1 for cell in cells.values())
    found = [Scores.read(path) for path in (tmp_path / "run-v1.2").glob("*.scores.json")]
    assert {scores.model: scores.sequences[0].ids[1] for scores in found} == dict(
        zip(MODELS, range(10, 14), strict=True)
    )


def test_scores_of_another_model_are_refused(monkeypatch, tmp_path, capsys):
    out = tmp_path / "m.json"
    run_models(monkeypatch, out, MODELS[:2])
    content = json.loads(out.read_text())
    content["cells"] = {name: cell for name, cell in content["cells"].items() if "triton" not in name}
    out.write_text(json.dumps(content))
    first, second = ((tmp_path / "m" / f"{name}.scores.json") for name in MODELS[:2])
    first.replace(second)
    assert run_models(monkeypatch, out, MODELS[1:2])[0] == 2
    assert f"{second} is of the model 'gpt-v1.1', not of 'gpt-v1.2'" in capsys.readouterr().err


@rows("text", "[]", "{}", '{"cells": []}', "{", "[" * 100_000)
def test_a_file_of_something_else_is_refused(text, monkeypatch, tmp_path, capsys):
    (tmp_path / "matrix.json").write_text(text)
    monkeypatch.setattr(sys, "argv", ["evals", "matrix", "--out", str(tmp_path / "matrix.json")])
    assert main() == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert str(tmp_path / "matrix.json") in error


@rows(
    "flags, words",
    (["--out", "run"], "--out run must end in .json"),
    (["--out", "run-v1.2"], "--out run-v1.2 must end in .json"),
    (["--out", "/dev/null/run.json"], "--out /dev/null/run.json: its folder cannot be made"),
    (["--items", "100000"], "--items is 100000"),
    (["--questions", "0"], "--questions is 0"),
    (["--launches", "lazy"], "--launches lazy"),
)
def test_wrong_flags_are_refused_before_a_server_starts(flags, words, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(matrix, "serving", lambda *_: pytest.fail("a server was started"))
    monkeypatch.setattr(sys, "argv", ["evals", "matrix", *flags])
    assert main() == 2
    assert words in capsys.readouterr().err
