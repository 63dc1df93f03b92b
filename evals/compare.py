"""Compares two runs item by item, from the files that `tiny --answers` wrote; the last line is JSON."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

ROW = {"id": str, "category": str, "answer": str, "correct": bool}


def read_answers(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of one run by item id.

    Raises:
        ValueError: the file is empty or not UTF-8, a line is not a row of answers, or an id comes twice.
    """
    rows: dict[str, dict[str, Any]] = {}
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")  # other separators may be in answers
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if lines == [""]:
        raise ValueError(f"{path} holds no answers")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not a row that `tiny --answers` wrote: {error}") from error
        for name, kind in ROW.items():
            if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                raise ValueError(
                    f"{path}, line {number} is not a row that `tiny --answers` wrote: it lacks {name} ({kind.__name__})"
                )
        if row["id"] in rows:
            raise ValueError(f"{path}, line {number}: item {row['id']!r} is there twice")
        rows[row["id"]] = row
    return rows


def need_same_items(first: dict[str, Any], second: dict[str, Any], paths: tuple[Path, Path]) -> None:
    """Raise ValueError unless both runs answered exactly the same items."""
    for path, missing in ((paths[1], first.keys() - second.keys()), (paths[0], second.keys() - first.keys())):
        if missing:
            raise ValueError(
                f"the runs answered different items: {path} lacks {len(missing)} of the other's, for example "
                f"{min(missing)!r}"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this comparison."""
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--at-least", type=float, default=0.98, help="share of items that must have the same answer")
    parser.add_argument("--show", type=int, default=0, help="differing answers printed")


def main(args: argparse.Namespace) -> int:
    """Exit status 0 if the share of items with the same answer, word for word, reaches `--at-least`, else 1."""
    if not 0 <= args.at_least <= 1:
        raise ValueError(f"--at-least is {args.at_least}: it must lie between 0 and 1")
    first, second = read_answers(args.first), read_answers(args.second)
    need_same_items(first, second, (args.first, args.second))
    items, answers, verdicts = Counter[str](), Counter[str](), Counter[str]()
    for row_id, one in first.items():
        other, category = second[row_id], one["category"]
        items[category] += 1
        answers[category] += one["answer"] == other["answer"]
        verdicts[category] += one["correct"] == other["correct"]
        if one["answer"] != other["answer"] and sum(items.values()) - sum(answers.values()) <= args.show:
            print(f"  {row_id}: {one['answer']!r} -> {other['answer']!r}")
    print(f"{'category':15} {'items':>6} {'same answer':>12} {'same verdict':>13}")
    for category in items:
        print(f"{category:15} {items[category]:6} {answers[category]:12} {verdicts[category]:13}")
    total, same = items.total(), answers.total()
    passed = same >= args.at_least * total
    print(
        json.dumps(
            {
                "eval": "compare", "items": total, "same_answer": same, "agreement": round(same / total, 4),
                "same_verdict": verdicts.total(), "right_first": _num_right(first), "right_second": _num_right(second),
                "at_least": args.at_least, "passed": passed,
            }
        )
    )  # fmt: skip
    return 0 if passed else 1


def _num_right(rows: dict[str, dict[str, Any]]) -> int:
    return sum(bool(row["correct"]) for row in rows.values())
