"""The file of one run: what was asked, with which settings, and every answer with its score."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evals.stats import interval

_KINDS = {"id": str, "category": str, "prompt": str, "answer": str, "score": (int, float)}


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question and its answer. `score` lies between 0 and 1. `details`: reasoning, how the answer ended, other
    scores; shown in reports and never compared.
    """

    id: str
    category: str
    prompt: str
    answer: str
    score: float
    expected: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Run:
    """`settings` are those that could change an answer; `server` says who answered. Only the server may differ between
    runs that are compared.
    """

    eval: str
    settings: dict[str, Any]
    server: dict[str, Any]
    items: list[Item]
    notes: dict[str, Any] = field(default_factory=dict)

    def categories(self) -> dict[str, list[Item]]:
        """The items by category, in the order of the run."""
        found: dict[str, list[Item]] = {}
        for item in self.items:
            found.setdefault(item.category, []).append(item)
        return found

    def summary(self) -> dict[str, dict[str, Any]]:
        """Number of items, mean score in per cent and its 95 % interval, by category and for all."""
        groups = self.categories()
        return {
            name: _summary(items)
            for name, items in (groups if len(groups) == 1 else groups | {"all": self.items}).items()
        }

    def write(self, path: Path) -> None:
        """As JSON, with the summary."""
        content = {name: value for name, value in asdict(self).items() if name != "items"}
        content |= {"summary": self.summary(), "items": [asdict(item) for item in self.items]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Run:
        """The run that `write` wrote.

        Raises:
            ValueError: the file is not such a run, has no items, has one twice, or a score that is not from 0 to 1.
            OSError: it cannot be read.
        """
        what = f"{path} is not a run that `evals run --out` or `evals tiny --answers` wrote"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{what}: {error}") from error
        if not isinstance(content, dict) or not all(
            isinstance(content.get(name), kind)
            for name, kind in (("eval", str), ("settings", dict), ("server", dict), ("items", list))
        ):
            raise ValueError(f"{what}: it needs eval, settings, server and items")
        items: dict[str, Item] = {}
        for number, row in enumerate(content["items"], 1):
            for name, kind in _KINDS.items():
                if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                    raise ValueError(f"{what}: item {number} has no {name}, or one of the wrong type")
            if isinstance(row["score"], bool) or not 0 <= row["score"] <= 1:
                raise ValueError(f"{what}: item {number} has the score {row['score']}: it must lie between 0 and 1")
            if row["id"] in items:
                raise ValueError(f"{path}: item {row['id']!r} is there twice")
            items[row["id"]] = Item(**{name: row[name] for name in Item.__dataclass_fields__ if name in row})
        if not items:
            raise ValueError(f"{path} holds no items")
        return cls(
            eval=content["eval"], settings=content["settings"], server=content["server"], items=[*items.values()],
            notes=content.get("notes", {}),
        )  # fmt: skip


def _summary(items: list[Item]) -> dict[str, Any]:
    scores = [item.score for item in items]
    return {
        "items": len(items), "percent": round(100 * sum(scores) / len(scores), 2),
        "interval": [round(100 * end, 2) for end in interval(scores)],
    }  # fmt: skip
