"""Kernels are compiled ahead, several at a time, and launched once they are; what fails ahead never fails a start."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("moe", "model", "engine")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `compiled_ahead` prints, with an empty cache of kernels."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("kernels")), "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.moe.kernels.compiled_ahead"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


def test_every_kernel_is_compiled_once_and_nothing_is_launched(told: dict[str, Any]) -> None:
    ahead = told["ahead"]
    assert (ahead["compiled"], ahead["launched"]) == (["scale False"] * 4, [])
    [line] = ahead["lines"]
    assert re.fullmatch(r"a start: compiled or loaded 4 kernels ahead in \d+\.\d s with \d+ workers", line)


def test_the_real_launches_find_their_kernels_in_memory_and_a_cpu_compiles_none(told: dict[str, Any]) -> None:
    assert told["cpu"] == {"compiled": [], "launched": [], "lines": []}
    assert told["real"] == {"compiled": [], "launched": [["scale", 4]] * 4 + [["scale", 8], ["scale", 4]], "lines": []}


def test_a_kernel_or_a_run_that_fails_ahead_is_logged_and_compiled_anew_by_its_launch(told: dict[str, Any]) -> None:
    assert told["failed"]["launched"] == []
    of_run, of_kernel, total = told["failed"]["lines"]
    assert of_run == "a bad start: not all kernels are compiled ahead: RuntimeError: out of memory"
    assert of_kernel.startswith("a bad start: kernels that could not be compiled ahead: 1; the first: ")
    assert "broken on purpose" in of_kernel
    assert total.startswith("a bad start: compiled or loaded 1 kernels ahead")
    after = told["real after failure"]  # from the cache on disk
    assert (after["launched"], after["compiled"]) == ([["may_be_broken", 4]], ["may_be_broken True"])
    assert told["error"].endswith("CompilationError") or "CompileTime" in told["error"]


def test_every_kernel_is_launched_by_launch() -> None:
    """A launch of its own would run in the middle of kernels that did not."""
    texts = {path: path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    kernels = {name for text in texts.values() for name in re.findall(r"@triton\.jit.*\ndef (\w+)", text)}
    assert {"grouped_gemm", "draw_tokens", "_add_rms_norm"} <= kernels
    launches = re.compile(rf"\b({'|'.join(kernels)})\[")
    assert [(path, name) for path, text in texts.items() for name in launches.findall(text)] == []
