"""Draws one expert layer by number of tokens, from the rows of `benchmarks.bench_moe`. Needs matplotlib."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from server.bench.errors import BenchError
from server.bench.plot import save

OURS = "triton"
Row = dict[str, Any]
Key = tuple[str, str, str]  # model, format, routing


def rows_of(records: Iterable[dict[str, Any]]) -> list[Row]:
    """Rows of all records; of two for the same case the later one counts."""
    rows: dict[tuple[Any, ...], Row] = {}
    for record in records:
        for row in record["rows"]:
            rows[*key_of(row), row["tokens"], row["backend"]] = row
    return list(rows.values())


def key_of(row: Row) -> Key:
    """What belongs into one table."""
    return row["model"], row["format"], row["routing"]


def series(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """(tokens, us) by contender, and the floor, of one panel."""
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        lines.setdefault("floor", {})[row["tokens"]] = row["floor_us"]
        lines.setdefault(row["backend"], {})[row["tokens"]] = row["us"]
    return {name: sorted(points.items()) for name, points in lines.items()}


def draw_layers(rows: list[Row], routing: str, path: Path, title: str | None = None) -> None:
    """Write the PNG: a panel for each model and format. Raises BenchError if nothing has that routing."""
    from matplotlib import pyplot

    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["routing"] == routing:
            panels.setdefault((row["model"], row["format"]), []).append(row)
    if not panels:
        known = ", ".join(sorted({row["routing"] for row in rows}))
        raise BenchError(f"--routing: no row has {routing!r}; the records have {known}")
    names = sorted({row["backend"] for row in rows} - {OURS})
    color = {"floor": "black", OURS: "C3"} | {name: f"C{(0, 1, 2, 4, 5, 6, 8)[i % 7]}" for i, name in enumerate(names)}
    num_columns = min(3, len(panels))
    num_lines = math.ceil(len(panels) / num_columns)
    figure, grid = pyplot.subplots(
        num_lines, num_columns, figsize=(5.2 * num_columns, 4.0 * num_lines), squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, ((model, format_name), panel) in zip(grid.flat, sorted(panels.items()), strict=False):
        for name, points in series(panel).items():
            style = {"linestyle": ":"} if name == "floor" else {"marker": "o", "markersize": 3}
            width = 2.2 if name == OURS else 1.2
            axes.plot(*zip(*points, strict=True), label=name, linewidth=width, color=color[name], **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{model}, {format_name}", fontsize=10)
        axes.set_xlabel("tokens")
        axes.set_ylabel("microseconds per layer")
        axes.grid(visible=True, which="both", linewidth=0.3)
        axes.legend(fontsize=7)
    cards = sorted({row["card"] for row in rows if "card" in row})
    figure.suptitle(title or ", ".join(["One expert layer", f"{routing} routing", *cards]))
    save(figure, path)
