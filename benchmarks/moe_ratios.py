"""Prints how many times faster than the best rival our kernels are, from the rows of `bench_moe`.

    python -m benchmarks.moe_ratios moe.json [more.json ...]

Later files replace rows of earlier ones. `moe-serve bench plot` draws them.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from server.bench.layers import OURS, Key, Row, key_of, rows_of

PART = "triton_kernels_bare"  # without its sort by expert, which every other contender times: no rival, a yardstick


def load(paths: Iterable[Path]) -> list[Row]:
    """Rows of all documents; of two for the same case the later one counts."""
    return rows_of(json.loads(path.read_text(encoding="utf-8")) for path in paths)


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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", type=Path, nargs="+", help="what bench_moe wrote")
    print(markdown(ratios(load(parser.parse_args().documents))))


if __name__ == "__main__":
    main()
