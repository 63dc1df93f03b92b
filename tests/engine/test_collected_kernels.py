"""A start collects every kernel that it launches, so that none is compiled alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import load
from engine.config import EngineConfig
from tests.engine.fakes import FakeModel
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


def test_the_self_check_compiles_once_for_all_layers_of_a_format(keys: dict[str, dict[str, list[str]]]) -> None:
    assert keys["warm-up"]["ahead of the self-check"] == ["self-check of mxfp4"]


@rows("device, can_compile, want", ("cuda", True, ["warm-up"]), ("cuda", False, []), ("cpu", True, []))
def test_a_start_on_a_gpu_compiles_ahead_if_the_model_lets_it(
    monkeypatch: pytest.MonkeyPatch, device: str, can_compile: bool, want: list[str]
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(load, "compile_ahead", lambda what, run, device: calls.append(what))
    for name in ("choose_cuda_pages", "choose_cpu_pages"):
        monkeypatch.setattr(load, name, lambda *_, **__: calls.append("pages") or 1 / 0)
    model = FakeModel()
    model.device, model.can_compile_ahead = torch.device(device), can_compile
    with pytest.raises(ZeroDivisionError):
        load.load_engine(EngineConfig(model=Path("unused"), enforce_eager=True), model)
    assert calls == [*want, "pages"], "it must come before memory is measured"
