"""What a plot shows. matplotlib is an extra that tests do not need: a stand-in notes what would be drawn."""

import sys
from array import array
from unittest.mock import MagicMock

import numpy as np
import pytest

from server.bench.load import Record
from server.bench.plot import draw
from server.bench.processes import ProcessResult, RunResult
from server.bench.summary import summarize


def run_of(records, cpu_s=0.1):
    return RunResult(10.0, [ProcessResult(records, cpu_s, 3.0)])


def record(start_s, times, end_s, **more):
    return Record(start_s, end_s, array("d", times), array("L", [1] * len(times)), 5, len(times), **more)


@pytest.fixture
def pyplot(monkeypatch):
    library = MagicMock()
    axes = np.empty((2, 2), dtype=object)
    for index in np.ndindex(2, 2):
        axes[index] = MagicMock()
    library.pyplot.subplots.return_value = (MagicMock(), axes)
    monkeypatch.setitem(sys.modules, "matplotlib", library)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", library.pyplot)
    return library.pyplot


def test_panels_hold_the_values_of_the_run(tmp_path, pyplot):
    figure, axes = pyplot.subplots.return_value
    run = run_of(
        [
            record(10.0, [10.5, 11.5, 12.0], 12.0),
            record(10.0, [10.1, 10.2], 12.5, is_cut=True),
            record(10.0, [11.0], 11.0, error="HTTP 500"),
        ]
    )
    draw(tmp_path / "new" / "run.png", "title", run, summarize(run))
    (ttft_ms, shares), _ = axes[0, 0].plot.call_args
    assert np.allclose(ttft_ms, [100, 500])
    assert np.allclose(shares, [0.5, 1])
    assert np.allclose(axes[0, 1].plot.call_args[0][0], [100, 500, 1000])
    assert np.allclose(axes[1, 0].plot.call_args[0][0], [2000])
    assert axes[1, 1].step.call_args[0][1].tolist() == [3, 1, 1]
    axes[1, 0].set_xscale.assert_not_called()
    figure.suptitle.assert_called_once_with("title", color="black")
    assert figure.savefig.call_args[0] == (tmp_path / "new" / "run.png",)
    pyplot.close.assert_called_once_with(figure)


def test_a_void_run_is_marked(tmp_path, pyplot):
    figure, axes = pyplot.subplots.return_value
    run = run_of([record(10.0, [], 11.0, error="timeout")], cpu_s=2.9)
    draw(tmp_path / "run.png", "title", run, summarize(run))
    figure.suptitle.assert_called_once_with("VOID, the client was too slow\ntitle", color="C3")
    axes[0, 0].plot.assert_not_called()
