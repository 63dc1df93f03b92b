"""Compares two runs item by item: do they differ beyond noise? The last line is JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from evals.results import Item, Run
from evals.stats import Paired, paired


def pairs_of(
    first: Run, second: Run, names: tuple[object, object] = ("the first", "the second")
) -> list[tuple[Item, Item]]:
    """The same item of both runs, in the order of the first.

    Raises:
        ValueError: the runs are of different evals, settings or items; the message names one that differs.
    """
    if first.eval != second.eval:
        raise ValueError(
            f"{names[0]} is a run of {first.eval} and {names[1]} of {second.eval}: they cannot be compared"
        )
    for name in sorted(first.settings.keys() | second.settings.keys()):
        values = [run.settings.get(name) for run in (first, second)]
        if values[0] != values[1]:
            raise ValueError(
                f"the runs have different settings: {name} is {values[0]!r} in {names[0]} and {values[1]!r} in "
                f"{names[1]}; run one of them again"
            )
    items = [{item.id: item for item in run.items} for run in (first, second)]
    for here, there in ((0, 1), (1, 0)):
        missing = items[here].keys() - items[there].keys()
        if missing:
            raise ValueError(
                f"the runs answered different items: {names[there]} lacks {len(missing)} of the other's, for example "
                f"{min(missing)!r}"
            )
    for name, item in items[0].items():
        other = items[1][name]
        if (item.category, item.prompt, item.expected) != (other.category, other.prompt, other.expected):
            raise ValueError(
                f"the runs answered different items: {name!r} asks or expects something else in {names[1]}"
            )
    return [(item, items[1][name]) for name, item in items[0].items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this comparison."""
    parser.add_argument("first", type=Path, help="a file that `run --out` or `tiny --answers` wrote")
    parser.add_argument("second", type=Path, help="another")
    parser.add_argument(
        "--alpha", type=float, default=0.05,
        help="a difference is beyond noise if chance alone makes one as large in fewer runs than this share [0.05]; "
        "0 only reports",
    )  # fmt: skip
    parser.add_argument("--at-least", type=float, default=0.0, help="share of items that must have the same answer [0]")
    parser.add_argument("--show", type=int, default=0, help="differing answers printed")


def main(args: argparse.Namespace) -> int:
    """Exit status 0 unless the scores differ beyond noise or too few answers are the same, word for word; then 1."""
    for name, value in (("--alpha", args.alpha), ("--at-least", args.at_least)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}: it must lie between 0 and 1")
    first = Run.read(args.first)
    pairs = pairs_of(first, Run.read(args.second), (args.first, args.second))
    for one, other in [pair for pair in pairs if pair[0].answer != pair[1].answer][: args.show]:
        print(f"  {one.id}: {one.answer!r} ({one.score:g}) -> {other.answer!r} ({other.score:g})")
    print(
        f"{'category':15} {'items':>6} {'first %':>8} {'second %':>9} {'better':>7} {'worse':>6} {'p':>7} {'same':>6}"
    )
    for category in first.categories():
        _show(category, [pair for pair in pairs if pair[0].category == category])
    whole = _show("all", pairs)
    same = sum(one.answer == other.answer for one, other in pairs)
    differs = whole.p < args.alpha
    passed = not differs and same >= args.at_least * len(pairs)
    ends = f"{100 * whole.low:+.2f} and {100 * whole.high:+.2f}"
    where = f"second minus first: {100 * whole.difference:+.2f} points, 95 % between {ends}"
    verdict = "the runs differ beyond noise" if differs else "no difference beyond noise"
    print(f"{verdict} ({whole.test}, p = {whole.p:.3g}); {where}")
    print(
        json.dumps(
            {
                "eval": "compare", "of": first.eval, "items": len(pairs), "same_answer": same,
                "agreement": round(same / len(pairs), 4),
                "same_verdict": sum(one.score == other.score for one, other in pairs),
                "right_first": sum(one.score == 1 for one, _ in pairs),
                "right_second": sum(other.score == 1 for _, other in pairs),
                **asdict(whole), "alpha": args.alpha, "at_least": args.at_least, "differs": differs, "passed": passed,
            }
        )
    )  # fmt: skip
    return 0 if passed else 1


def _show(category: str, pairs: list[tuple[Item, Item]]) -> Paired:
    """Print one line of the table."""
    scores = [[item.score for item in run] for run in zip(*pairs, strict=True)]
    result = paired(*scores)
    means = [100 * sum(run) / len(run) for run in scores]
    same = sum(one.answer == other.answer for one, other in pairs)
    print(
        f"{category:15} {len(pairs):6} {means[0]:8.2f} {means[1]:9.2f} {result.num_better:7} {result.num_worse:6} "
        f"{result.p:7.3f} {same:6}"
    )
    return result
