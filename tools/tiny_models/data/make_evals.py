"""Writes the held-out items that `python -m evals tiny` asks, with a fixed seed, to evals/data/.

python -m tools.tiny_models.data.make_evals
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.tiny_models.data import gen_facts, phrasings
from tools.tiny_models.data.example import Example
from tools.tiny_models.data.mix import held_out

DATA = Path(__file__).resolve().parents[3] / "evals" / "data"
SEED, ITEMS = 0, 1000


def facts() -> list[Example]:
    """Every entity in every relation once, the unseen phrasings taken in turn: four or five of them for each entity."""
    items = []
    for relation in (*gen_facts.COUNTRY_RELATIONS, *gen_facts.ELEMENT_RELATIONS):
        phrases = phrasings.HELD_OUT[relation]
        for number, row in enumerate(gen_facts.pool(relation)):
            items.append(gen_facts.ask(relation, row, phrases[number % len(phrases)]))
    return items


def as_item(example: Example) -> dict[str, Any]:
    """What a client sends and how the answer is judged."""
    item: dict[str, Any] = {"key": example.key, "messages": example.messages[:-1], "check": example.check}
    if example.tools:
        item["tools"] = example.tools
    return item


def build() -> dict[str, list[dict[str, Any]]]:
    """The items by category."""
    categories = held_out(SEED, ITEMS) | {"facts": facts()}
    return {name: [as_item(example) for example in examples] for name, examples in categories.items()}


def main() -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    for name, items in build().items():
        path = DATA / f"{name}.jsonl"
        path.write_text("".join(json.dumps(item, separators=(",", ":")) + "\n" for item in items))
        print(f"{path.name}: {len(items)} items, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
