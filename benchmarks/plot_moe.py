"""Draws the rows of `bench_moe` and prints how many times faster than the best rival our kernels are.

    python -m benchmarks.plot_moe moe.json [more.json ...] --out moe.png [--routing uniform]

One panel per model and format: microseconds over tokens, both logarithmic, with the floor. Later files replace rows of
earlier ones. Drawing needs matplotlib (extra `bench`); the table does not.
"""

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OURS = "triton"
PART = "triton_kernels_bare"  # without its sort by expert, which every other contender times: no rival, a yardstick
Row = dict[str, Any]
Key = tuple[str, str, str]  # model, format, routing


def load(paths: Iterable[Path]) -> list[Row]:
    """Rows of all documents; of two for the same case the later one counts."""
    rows: dict[tuple[Any, ...], Row] = {}
    for path in paths:
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            rows[*key_of(row), row["tokens"], row["backend"]] = row
    return list(rows.values())


def key_of(row: Row) -> Key:
    """What belongs into one table."""
    return row["model"], row["format"], row["routing"]


def ratios(rows: list[Row]) -> list[Row]:
    """One row per case and number of tokens that we were measured for: ours, the best rival, and their ratio.

    `rival` and `ratio` are None where no rival ran, as is `part_ratio` for PART; `of_floor` is the floor's share of our
    time. NVFP4 is compared with our own FP8 blocks of the same layer.
    """
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((*key_of(row), row["tokens"]), {})[row["backend"]] = row
    table = []
    for (model, format_name, routing, tokens), backends in sorted(cases.items(), key=lambda case: case[0]):
        if OURS not in backends:
            continue
        ours = backends[OURS]
        rivals = [row for name, row in backends.items() if name not in (OURS, PART)]
        wider = cases.get((model, "fp8_block", routing, tokens), {}).get(OURS)
        if format_name == "nvfp4" and wider is not None:  # no other kernel runs NVFP4 weights on Hopper
            rivals.append(wider | {"backend": f"{OURS} fp8_block"})
        best = min(rivals, key=lambda row: row["us"], default=None)
        table.append(
            {
                "model": model, "format": format_name, "routing": routing, "tokens": tokens,
                "active_experts": ours["active_experts"], "floor_us": ours["floor_us"], "us": ours["us"],
                "of_floor": round(ours["floor_us"] / ours["us"], 2),
                "rival": None if best is None else best["backend"], "rival_us": None if best is None else best["us"],
                "ratio": None if best is None else round(best["us"] / ours["us"], 2),
                "part_ratio": round(backends[PART]["us"] / ours["us"], 2) if PART in backends else None,
            }
        )  # fmt: skip
    return table


def markdown(table: list[Row]) -> str:
    """The table of `ratios`, one heading per model, format and routing."""
    lines: list[str] = []
    last: Key | None = None
    for row in table:
        if key_of(row) != last:
            last = key_of(row)
            lines += ["", f"{row['model']}, {row['format']}, {row['routing']} routing", ""]
            lines += [
                "| tokens | active experts | floor, us | ours, us | floor / ours | best rival, us | faster by "
                f"| than {PART} by |"
            ]
            lines += ["| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
        rival = "none" if row["rival"] is None else f"{row['rival_us']:.1f} {row['rival']}"
        ratio, part = ("" if row[name] is None else f"{row[name]:.2f}" for name in ("ratio", "part_ratio"))
        lines.append(
            f"| {row['tokens']} | {row['active_experts']:g} | {row['floor_us']:.1f} | {row['us']:.1f} "
            f"| {row['of_floor']:.2f} | {rival} | {ratio} | {part} |"
        )
    return "\n".join(lines[1:])


def series(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """(tokens, us) by contender, and the floor, of one panel."""
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        lines.setdefault("floor", {})[row["tokens"]] = row["floor_us"]
        lines.setdefault(row["backend"], {})[row["tokens"]] = row["us"]
    return {name: sorted(points.items()) for name, points in lines.items()}


def draw(rows: list[Row], routing: str, path: Path) -> None:
    """Write the PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["routing"] == routing:
            panels.setdefault((row["model"], row["format"]), []).append(row)
    names = sorted({row["backend"] for row in rows} - {OURS})
    color = {"floor": "black", OURS: "C3"} | {name: f"C{(0, 1, 2, 4, 5, 6, 8)[i % 7]}" for i, name in enumerate(names)}
    num_columns = min(3, max(1, len(panels)))
    num_lines = max(1, math.ceil(len(panels) / num_columns))
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
    figure.suptitle(f"One expert layer, {routing} routing, {', '.join(sorted({row['card'] for row in rows}))}")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Print the table, draw the panels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", type=Path, nargs="+", help="what bench_moe wrote")
    parser.add_argument("--out", type=Path, help="the PNG; without it only the table is printed")
    parser.add_argument("--routing", default="uniform", help="routing of the plot")
    args = parser.parse_args()
    rows = load(args.documents)
    print(markdown(ratios(rows)))
    if args.out:
        draw(rows, args.routing, args.out)


if __name__ == "__main__":
    main()
