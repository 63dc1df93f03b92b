"""`evals matrix`: which cells are final, which are tried again, and the exit status. Its servers are stand-ins."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from evals import matrix
from evals.__main__ import main
from evals.client import ServerError
from tests.tables import rows

FIGURES = {
    "device": "cuda", "right": 1, "items": 1, "same_answer": 1, "p": 1.0, "top1_agreement": 1.0,
    "kl_lower_bound": {"mean": 0.0, "p99": 0.0},
}  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """Runs two cells, torch and triton; `starts` and `measures` name the backends whose server does so."""

    def run(folder: Path, starts: list[str], measures: list[str]) -> tuple[int, dict]:
        tried = []

        @contextmanager
        def serving(command, log):
            tried.append(backend := command[command.index("--moe-backend") + 1])
            if backend not in starts:
                raise ServerError("refused")
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


@rows("text", "[]", "{}", '{"cells": []}', "{")
def test_a_file_of_something_else_is_refused(text, monkeypatch, tmp_path, capsys):
    (tmp_path / "matrix.json").write_text(text)
    monkeypatch.setattr(sys, "argv", ["evals", "matrix", "--out", str(tmp_path / "matrix.json")])
    assert main() == 2
    assert "Traceback" not in capsys.readouterr().err
