"""Draws a run: distributions of the latencies, and tokens over time. Needs matplotlib, the extra `bench`."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from server.bench.errors import BenchError
from server.bench.processes import RunResult
from server.bench.summary import Summary, token_gaps, tokens_per_second

_SUFFIXES = (".png", ".svg", ".pdf")


def check_suffix(flag: str, path: Path) -> None:
    """Raise BenchError for a file name that does not say how to write the picture."""
    if path.suffix.lower() not in _SUFFIXES:
        raise BenchError(f"{flag}: {path} must end in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}")


def check_matplotlib(what: str = "--plot") -> None:
    """Raise BenchError before a long run that could not be drawn. Then choose how to draw: into files."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError(f"{what} needs matplotlib: pip install matplotlib")
    import matplotlib as mpl

    mpl.use("Agg")


def save(figure: Any, path: Path) -> None:
    """Write the picture. Raises BenchError."""
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise BenchError(f"the picture cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def draw(path: Path, title: str, run: RunResult, summary: Summary) -> None:
    """Write the picture."""
    from matplotlib import pyplot

    counted = [record for record in run.records if record.error is None]
    finished = [record for record in counted if not record.is_cut]
    panels = {
        "time to first token": np.array([record.times[0] - record.start_s for record in counted if record.times]),
        "inter-token latency": token_gaps(counted),
        "end to end": np.array([record.end_s - record.start_s for record in finished]),
    }
    figure, axes = pyplot.subplots(2, 2, figsize=(10.4, 8.0), layout="constrained")
    for axis, (name, seconds) in zip(axes.flat, panels.items(), strict=False):
        _draw_distribution(axis, name, seconds)
    _draw_tokens(axes.flat[3], tokens_per_second(run, counted))
    void = "VOID, the client was too slow\n" if summary.void_reasons else ""
    figure.suptitle(f"{void}{title}", color="C3" if void else "black")
    save(figure, path)


def _draw_distribution(axis, name: str, seconds: np.ndarray) -> None:  # type: ignore[no-untyped-def]
    """Share of values at most x ms."""
    axis.set_title(name, fontsize=10)
    axis.set_xlabel("ms")
    axis.set_ylabel("share of values at or below")
    axis.grid(visible=True, which="both", linewidth=0.3)
    if not seconds.size:
        return
    values_ms = np.sort(seconds) * 1000
    axis.plot(values_ms, np.arange(1, values_ms.size + 1) / values_ms.size, drawstyle="steps-post")
    for percent, style in ((50, ":"), (99, "--")):
        value_ms = np.percentile(values_ms, percent)
        axis.axvline(value_ms, linestyle=style, color="black", linewidth=1, label=f"p{percent} {value_ms:.1f} ms")
    if values_ms[0] > 0 and values_ms[-1] > 10 * values_ms[0]:  # the ticks of less than a decade overlap
        axis.set_xscale("log")
    axis.legend(fontsize=8)


def _draw_tokens(axis, totals: np.ndarray) -> None:  # type: ignore[no-untyped-def]
    axis.step(np.arange(totals.size), totals, where="post")
    axis.set_title("output tokens in each second", fontsize=10)
    axis.set_xlabel("seconds since the start")
    axis.set_ylabel("tokens")
    axis.set_ylim(bottom=0)
    axis.grid(visible=True, linewidth=0.3)
