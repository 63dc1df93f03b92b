"""Runs test programs in Triton's interpreter, which takes another process: Triton chooses it when it is imported.

Tests get `Interpreter.run` as the fixture `run_interpreted`. The slow programs have two parts: the pick, which
`make test` runs, and all the rest, which `make kernels` runs.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 630  # alone they take up to 60 s; other tests and builds may share the cores
waits_for_interpreter = pytest.mark.timeout(TIMEOUT_S)
PARTS = [pytest.param("pick", id="pick"), pytest.param("rest", id="rest", marks=pytest.mark.kernels)]
SLOW_PARTS = [pytest.param(part, id=part, marks=pytest.mark.kernels) for part in ("pick", "rest")]  # no pick by default

RunInterpreted = Callable[..., Any]
"""`run(module, *arguments)` runs a program and returns the JSON that it prints."""


class Interpreter:
    """The process that runs the programs, with one thread. It starts with the first of them."""

    def __init__(self, folder: Path) -> None:
        """What programs print goes to files in `folder`."""
        self._out, self._err = folder / "out", folder / "err"
        self._process: subprocess.Popen[str] | None = None

    def run(self, module: str, *arguments: str) -> Any:
        """As `python -m module arguments` would, in a process of its own; returns the JSON that it prints."""
        for file in (self._out, self._err):
            file.unlink(missing_ok=True)
        process = self._process or self._start()
        try:
            print(json.dumps([str(self._out), str(self._err), module, *arguments]), file=process.stdin, flush=True)
            status = process.stdout.readline() if process.stdout is not None else ""
        except BaseException:  # the time of the test is up: the next one must not wait for this program
            os.killpg(process.pid, signal.SIGKILL)
            self.close()
            raise
        assert status == "0\n", self._err.read_text()[-3000:] if self._err.exists() else "the interpreter did not start"
        return json.loads(self._out.read_text())

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _start(self) -> "subprocess.Popen[str]":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.quick_interpreter"],
            cwd=ROOT,
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self._process
