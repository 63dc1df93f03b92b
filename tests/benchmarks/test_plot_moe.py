"""Table and plot of the MoE benchmark from its rows."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks import plot_moe


def row(backend: str, tokens: int, us: float, **changes: Any) -> dict[str, Any]:
    return {
        "model": "m", "format": "mxfp4", "routing": "uniform", "backend": backend, "tokens": tokens, "us": us,
        "floor_us": 10.0, "active_experts": 4, "card": "H100",
    } | changes  # fmt: skip


ROWS = [
    row("triton", 1, 20.0), row("flashinfer", 1, 70.0), row("triton_kernels", 1, 60.0),
    row("triton_kernels_bare", 1, 44.0),
    row("triton", 4, 50.0), row("flashinfer", 4, 40.0),
    row("triton", 1, 30.0, routing="zipf"),
    row("flashinfer", 64, 1.0),
]  # fmt: skip


def test_the_best_rival_of_the_same_case_counts() -> None:
    table = plot_moe.ratios(ROWS)
    assert [(r["routing"], r["tokens"], r["rival"], r["ratio"], r["part_ratio"], r["of_floor"]) for r in table] == [
        ("uniform", 1, "triton_kernels", 3.0, 2.2, 0.5),
        ("uniform", 4, "flashinfer", 0.8, None, 0.2),
        ("zipf", 1, None, None, None, 0.33),
    ]


def test_nvfp4_is_compared_with_our_own_fp8_blocks() -> None:
    rows = [row("triton", 1, 30.0, format="nvfp4"), row("triton", 1, 45.0, format="fp8_block")]
    fp8, nvfp4 = plot_moe.ratios(rows)
    assert (fp8["rival"], nvfp4["rival"], nvfp4["ratio"]) == (None, "triton fp8_block", 1.5)


def test_the_table_has_a_heading_per_case_and_a_line_per_number_of_tokens() -> None:
    text = plot_moe.markdown(plot_moe.ratios(ROWS))
    assert text.startswith("m, mxfp4, uniform routing")
    assert "| 1 | 4 | 10.0 | 20.0 | 0.50 | 60.0 triton_kernels | 3.00 | 2.20 |" in text
    assert "m, mxfp4, zipf routing" in text
    assert "| 1 | 4 | 10.0 | 30.0 | 0.33 | none |  |  |" in text


def test_lines_are_sorted_by_tokens_and_hold_the_floor() -> None:
    lines = plot_moe.series([row("triton", 4, 50.0, floor_us=11.0), row("triton", 1, 20.0)])
    assert lines == {"floor": [(1, 10.0), (4, 11.0)], "triton": [(1, 20.0), (4, 50.0)]}


def test_later_documents_replace_rows(tmp_path: Path) -> None:
    paths = []
    for index, rows in enumerate([ROWS, [row("triton", 1, 10.0)]]):
        paths.append(tmp_path / f"{index}.json")
        paths[-1].write_text(json.dumps({"rows": rows}))
    loaded = plot_moe.load(paths)
    assert len(loaded) == len(ROWS)
    assert plot_moe.ratios(loaded)[0]["ratio"] == 6.0


def test_a_panel_per_model_and_format_of_one_routing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """matplotlib is an extra that tests do not need: a stand-in notes what would be drawn."""
    library, pyplot, figure = mock.MagicMock(), mock.MagicMock(), mock.MagicMock()
    grid = np.empty((1, 2), dtype=object)
    grid[0, 0], grid[0, 1] = mock.MagicMock(), mock.MagicMock()
    pyplot.subplots.return_value = (figure, grid)
    library.pyplot = pyplot
    monkeypatch.setitem(sys.modules, "matplotlib", library)
    rows = [*ROWS, row("triton", 1, 5.0, format="bf16")]
    plot_moe.draw(rows, "uniform", tmp_path / "plot.png")
    assert pyplot.subplots.call_args.args == (1, 2)
    drawn = [[call.kwargs["label"] for call in axes.plot.call_args_list] for axes in grid.flat]
    assert drawn == [["floor", "triton"], ["floor", "triton", "flashinfer", "triton_kernels", "triton_kernels_bare"]]
    assert grid[0, 1].plot.call_args_list[1].args == ((1, 4), (20.0, 50.0))
    figure.savefig.assert_called_once_with(tmp_path / "plot.png", dpi=130)
