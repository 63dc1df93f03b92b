"""Runs test programs in Triton's interpreter, which takes a separate process: Triton chooses it when it is imported.

The slow programs have two parts: the pick, which `make test` runs, and all the rest, which `make kernels` runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 600  # alone they take up to 60 s; other tests and builds may share the cores
waits_for_interpreter = pytest.mark.timeout(TIMEOUT_S + 30)
PARTS = [pytest.param("pick", id="pick"), pytest.param("rest", id="rest", marks=pytest.mark.kernels)]
SLOW_PARTS = [pytest.param(part, id=part, marks=pytest.mark.kernels) for part in ("pick", "rest")]  # no pick by default


def run_interpreted(module: str, *arguments: str) -> Any:
    """Run `python -m module arguments` with the interpreter and one thread; returns the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.quick_interpreter", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
