"""Writes the tables of `moe/tables` from measurements of `bench_moe`: launch plans from --sweep, backends from times.

    python -m benchmarks.moe_tables --plans sweep.json --source benchmarks/results/moe_sweep_h100.json
    python -m benchmarks.moe_tables --backends moe.json --source benchmarks/results/moe_h100.json

An entry replaces the one of the same kind of GPU, format and shape; the others stay.
"""

import argparse
import dataclasses
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.moe_cases import CASES
from moe.kernels.plan import Plan
from moe.registry import BACKEND_MODULES

TABLES = Path(__file__).resolve().parents[1] / "moe" / "tables"
NEARLY = 1.03  # times the time of the fastest
ARCHS = {"NVIDIA H100 80GB HBM3": "sm90", "NVIDIA H200": "sm90"}
Entry = dict[str, Any]


def main() -> None:
    """Update both tables, or one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--plans", nargs="*", type=Path, default=[], help="documents of bench_moe --sweep")
    parser.add_argument("--backends", nargs="*", type=Path, default=[], help="documents of bench_moe")
    parser.add_argument("--source", required=True, help="where the measurement is kept, for the tables")
    args = parser.parse_args()
    for name, make, paths in (
        ("triton_plans.json", plan_entries, args.plans),
        ("backends.json", backend_entries, args.backends),
    ):
        rows = [row for path in paths for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
        if rows:
            target = TABLES / name
            old = json.loads(target.read_text(encoding="utf-8"))["tables"]
            target.write_text(dump(merged(old, make(rows, args.source))), encoding="utf-8")
            print(f"wrote {target}")


def plan_entries(rows: list[Entry], source: str) -> list[Entry]:
    """The best plan at each token count (see `_best`); it serves counts up to the geometric mean with the next.

    Raises:
        ValueError: the plan for the largest count cannot serve larger ones, a count has no times of uniform routing, or
            the kind of GPU is not known.
    """
    entries = []
    for (model, format_name, card), own in _grouped(rows, "model", "format", "card").items():
        best = {tokens: _best(some) for (tokens,), some in _grouped(own, "tokens").items()}
        counts = sorted(best)
        if best[counts[-1]]["plan"]["is_direct"]:
            raise ValueError(f"{model} {format_name}: the best plan at {counts[-1]} tokens is direct, which cannot "
                             f"serve all counts above; measure more tokens")  # fmt: skip
        bounds = [*(math.isqrt(low * high) for low, high in pairwise(counts)), None]
        steps = [
            {"max_tokens": bound, "us": best[tokens]["us"], "measured_at": tokens, "plan": _short(best[tokens]["plan"])}
            for bound, tokens in zip(bounds, counts, strict=True)
        ]
        commits = sorted({best[tokens]["commit"] for tokens in counts})
        entry = {"arch": _arch(card), "format": format_name, "shape": _shape(model), "card": card}
        entries.append(entry | {"commit": ", ".join(commits), "source": source, "steps": steps})
    return entries


def backend_entries(rows: list[Entry], source: str) -> list[Entry]:
    """Microseconds of the service's own backends, uniform routing."""
    entries = []
    rows = [row for row in rows if row["routing"] == "uniform" and row["backend"] in BACKEND_MODULES]
    for (model, format_name, card), own in _grouped(rows, "model", "format", "card").items():
        times = {
            name: {str(row["tokens"]): row["us"] for row in some} for (name,), some in _grouped(own, "backend").items()
        }
        common = set.intersection(*(set(time) for time in times.values()))  # a mean over other counts says nothing
        times = {name: {tokens: us for tokens, us in time.items() if tokens in common} for name, time in times.items()}
        entry = {"gpu": _arch(card), "format": format_name, "a2a": "none", "shape": _shape(model), "card": card}
        entries.append(entry | {"source": source, "microseconds": times})
    return entries


def merged(old: list[Entry], new: list[Entry]) -> list[Entry]:
    """Old entries of other GPUs, formats and shapes, and the new ones."""

    def key(entry: Entry) -> tuple[Any, ...]:
        return entry.get("arch", entry.get("gpu")), entry["format"], sorted(entry["shape"].items())

    return [entry for entry in old if key(entry) not in map(key, new)] + new


def dump(entries: list[Entry]) -> str:
    """JSON with one line for each entry's head and each of its steps."""
    texts = []
    for entry in entries:
        lists = {name: value for name, value in entry.items() if isinstance(value, list)}
        lines = [f'"{name}": {json.dumps(value)}' for name, value in entry.items() if name not in lists]
        for name, values in lists.items():
            items = ",\n".join(f"    {json.dumps(value)}" for value in values)
            lines.append(f'"{name}": [\n{items}\n   ]')
        texts.append("  {\n   " + ",\n   ".join(lines) + "\n  }")
    return '{\n "tables": [\n' + ",\n".join(texts) + "\n ]\n}\n"


def _best(rows: list[Entry]) -> Entry:
    """Of the plans nearly as fast as the fastest with uniform routing, the one with the smallest product of its times
    with uniform routing and with popular experts (zipf). Of several times of a plan the last counts; plans without one
    for popular experts come after those that have it, the fastest first.

    Raises:
        ValueError: nothing was measured with uniform routing.
    """
    uniform, zipf = (
        {json.dumps(row["plan"], sort_keys=True): row for row in rows if row["routing"] == kind}
        for kind in ("uniform", "zipf")
    )
    if not uniform:
        raise ValueError(
            "{model} {format} at {tokens} tokens: no plan was measured with uniform routing".format(**rows[0])
        )
    most = NEARLY * min(row["us"] for row in uniform.values())
    near = [plan for plan, row in uniform.items() if row["us"] <= most]

    def cost(plan: str) -> tuple[float, float]:
        us: float = uniform[plan]["us"]
        return us * zipf[plan]["us"] if plan in zipf else math.inf, us

    return uniform[min(near, key=cost)]


def _grouped(rows: list[Entry], *names: str) -> dict[tuple[Any, ...], list[Entry]]:
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def _arch(card: str) -> str:
    if card not in ARCHS:
        raise ValueError(f"the kind of GPU of {card!r} is not known: add the card to ARCHS in {Path(__file__).name}")
    return ARCHS[card]


def _shape(model: str) -> dict[str, int]:
    case = CASES[model]
    return {name: getattr(case, name) for name in ("num_experts", "top_k", "hidden_size", "intermediate_size")}


def _short(plan: Entry) -> Entry:
    """Fields that differ from their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(Plan)}
    return {name: value for name, value in plan.items() if value != defaults[name]}


if __name__ == "__main__":
    main()
