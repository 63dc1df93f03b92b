"""The runner benchmark calls the paths that it names."""

import pytest
import torch

from benchmarks import bench_runner
from tests.tables import rows

CPU = torch.device("cpu")


@rows("kind, num_core_calls", ("fused", 0), ("three-part", 1))
def test_a_run_goes_through_the_named_kind_of_path(
    kind: str, num_core_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(bench_runner.EmptyCore, "run", lambda *arguments: calls.append(arguments))
    runner, dispatched = bench_runner.empty_runner(kind, CPU)
    first, second = (runner.run(dispatched, object()) for _ in range(2))
    assert first is second  # nothing is allocated
    assert len(calls) == 2 * num_core_calls


def test_both_kinds_are_measured() -> None:
    assert set(bench_runner.measure(CPU, num_batches=2, num_calls=2)) == set(bench_runner.TARGETS_US)
