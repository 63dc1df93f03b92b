"""A start collects every kernel that it launches, so that none is compiled alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tables import rows

ROOT = Path(__file__).parents[2]
PARTS = {
    "self-check": {"direct_gemm", "group_slots", "grouped_gemm", "unpermute_sum"},
    "warm-up": {"decode", "direct_gemm", "draw_tokens", "grouped_gemm", "penalize_and_mask", "prefill", "rank_tokens"},
}


@pytest.fixture(scope="module")
def keys() -> dict[str, dict[str, list[str]]]:
    """What `collected_kernels` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.collected_kernels"],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


@rows("part", *PARTS)
def test_no_kernel_is_launched_that_was_not_collected(keys: dict[str, dict[str, list[str]]], part: str) -> None:
    collected, launched = set(keys[part]["collected"]), set(keys[part]["launched"])
    assert launched - collected == set()
    assert PARTS[part] <= {key.split()[0] for key in launched}  # a part that launches nothing would prove nothing
