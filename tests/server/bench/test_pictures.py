"""`moe-serve bench plot`: what it draws, by a stand-in for matplotlib, an extra that tests do not need."""

import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from server import cli
from server.bench import plot
from tests.tables import rows as table

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.fixture
def pyplot(monkeypatch):
    """Stands in for the library; `axes` are those of the last figure."""
    library = MagicMock()
    figures = []

    def subplots(lines=1, columns=1, squeeze=True, **_):
        axes = np.empty((lines, columns), dtype=object)
        for index in np.ndindex(lines, columns):
            axes[index] = MagicMock()
        library.pyplot.axes = axes
        figures.append(MagicMock())
        return figures[-1], axes.squeeze()[()] if squeeze else axes

    library.pyplot.subplots, library.pyplot.figures = subplots, figures
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: library)
    monkeypatch.setitem(sys.modules, "matplotlib", library)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", library.pyplot)
    return library.pyplot


def run_record(streams, rate, server="9.9", **changes):
    latency = {"p50": rate / 10, "p99": rate / 2}
    return {
        "is_void": False, "void_reasons": [], "server": {"model": "m", "version": server, "url": "u"},
        "settings": {"concurrency": streams, "request_rate": None},
        "results": {"output_tokens_per_s": rate, "latencies_ms": {"ttft": latency, "itl": None}},
    } | changes  # fmt: skip


def layer(backend, tokens, us, **changes):
    return {
        "model": "m", "format": "mxfp4", "routing": "uniform", "backend": backend, "tokens": tokens, "us": us,
        "floor_us": 10.0, "card": "H100",
    } | changes  # fmt: skip


def drawn(tmp_path, *records, flags=()):
    paths = []
    for number, record in enumerate(records):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(record))
    return cli.main(["bench", "plot", *map(str, paths), "--out", str(tmp_path / "out.png"), *flags])


def test_runs_are_lines_over_the_load(pyplot, tmp_path):
    assert drawn(tmp_path, run_record(8, 50), run_record(1, 10), run_record(1, 9, "other"), flags=["--title", "T"]) == 0
    rates, ttft, _ = pyplot.axes[0]
    assert [call.args[:2] for call in rates.plot.call_args_list] == [([1, 8], [10, 50]), ([1], [9])]
    assert [call.args[1] for call in ttft.plot.call_args_list] == [[1, 5], [5, 25], [0.9], [4.5]]
    pyplot.figures[0].suptitle.assert_called_once_with("T")
    assert pyplot.figures[0].savefig.call_args.args == (tmp_path / "out.png",)


def test_layers_have_a_panel_for_each_model_and_format_of_one_routing(pyplot, tmp_path):
    first = [layer("triton", 4, 50), layer("triton", 1, 20), layer("rival", 1, 70), layer("triton", 1, 9, format="x")]
    later = [layer("triton", 1, 10), layer("triton", 1, 1, routing="zipf")]
    assert drawn(tmp_path, {"rows": first}, {"rows": later}) == 0
    panel, other = pyplot.axes.flat
    lines = {call.kwargs["label"]: call.args for call in panel.plot.call_args_list}
    assert lines == {"floor": ((1, 4), (10, 10)), "triton": ((1, 4), (10, 50)), "rival": ((1,), (70,))}
    assert [call.kwargs["label"] for call in other.plot.call_args_list] == ["floor", "triton"]


def test_the_pictures_of_the_readme_can_be_drawn(pyplot, tmp_path):
    for name, texts in (("service_vs_sglang_h200.json", 7), ("moe_h100.json", 6)):
        assert drawn(tmp_path, json.loads((RESULTS / name).read_text())) == 0
        assert sum(bool(axes.mock_calls) for axes in pyplot.axes.flat) in (1, texts)
        if texts == 7:
            cases, ratios = pyplot.axes[0, 0].barh.call_args.args
            assert (cases[-1], ratios[-1]) == ("decode, 1 stream, prompts of 1,000", 2.072)


@table(
    "records, flags, message",
    ([run_record(1, 1), {"rows": [layer("triton", 1, 1)]}], [], "of different kinds (expert layers, runs of moe-serve"),
    ([{"rows": [{"seconds": 1}]}], [], "nothing is known to draw of it; known are runs of moe-serve bench, two"),
    ([[1]], [], "is no record: it must be a JSON object"),
    ([run_record(1, 1, is_void=True, void_reasons=["slow"])], [], "0.json is void: slow"),
    ([run_record(1, 1, results={})], [], "0.json is damaged: Object missing required field `output_tokens_per_s` - at"),
    ([run_record(1, 1, settings={})], [], "0.json is damaged"),
    ([run_record(1, 1, server=7)], [], "0.json is damaged: Expected `str | null`, got `int` - at `$.server.version`"),
    ([run_record(None, 1)], [], "no load to draw over"),
    ([{"rows": [layer("triton", 1, 1), {}]}], [], "0.json is damaged"),
    ([{"rows": [layer("triton", 1, None)]}], [], "0.json is damaged: Expected `float`, got `null`"),
    ([{"rows": [{"unit": "x", "streams": 1, "prompt": 1, "ratio_in_one_run": 1}]}], [], "0.json is damaged"),
    ([{"rows": [layer("triton", 1, 1)]}], ["--routing", "zipf"], "no row has 'zipf'; the records have uniform"),
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(pyplot, tmp_path, capsys, records, flags, message):
    assert drawn(tmp_path, *records, flags=flags) == 2
    assert message in capsys.readouterr().err


def test_a_missing_library_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert drawn(tmp_path, run_record(1, 1)) == 2
    assert "needs matplotlib: pip install matplotlib" in capsys.readouterr().err
