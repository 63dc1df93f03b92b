"""Measures the bundled model's accuracy on items that its training never saw. Prints a table, then a line of JSON."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

from evals.client import Answer, Client, in_parallel
from evals.scoring import is_right

DATA = Path(__file__).parent / "data"
# Per cent; categories without a bar are reported only.
BARS = {"addition": 95.0, "facts": 98.0, "sorting": 95.0, "reversing": 95.0, "tools": 90.0}


def load(categories: list[str], limit: int | None) -> dict[str, list[dict[str, Any]]]:
    """The items by category; a limit picks the same ones every time. Raises ValueError for an unknown category."""
    found = {path.stem: path for path in sorted(DATA.glob("*.jsonl"))}
    unknown = [name for name in categories if name not in found]
    if unknown:
        raise ValueError(f"unknown categories {unknown}: there are {sorted(found)}")
    items = {}
    for name in categories or list(found):
        lines = found[name].read_text().splitlines()
        step = max(1, len(lines) // limit) if limit else 1
        items[name] = [json.loads(line) for line in lines[::step][:limit]]
    return items


def spread(items: dict[str, list[dict[str, Any]]], count: int) -> dict[str, list[dict[str, Any]]]:
    """`count` items spread evenly over all of them, so that each category keeps its share; the same ones every time.

    Raises:
        ValueError: there are fewer.
    """
    rows = [(name, item) for name, of_category in items.items() for item in of_category]
    if not 1 <= count <= len(rows):
        raise ValueError(f"--items is {count}: it must lie between 1 and {len(rows)}, the items there are")
    chosen: dict[str, list[dict[str, Any]]] = {}
    for index in range(count):
        name, item = rows[index * len(rows) // count]
        chosen.setdefault(name, []).append(item)
    return chosen


def run(client: Client, item: dict[str, Any], options: dict[str, Any]) -> tuple[bool, Answer]:
    """Asks one item and judges the answer."""
    tools = {"tools": item["tools"]} if item.get("tools") else {}
    reply = client.ask(item["messages"], **tools, **options)
    return is_right(item["check"], reply.content, reply.calls), reply


def evaluate(
    client: Client,
    category: str,
    items: list[dict[str, Any]],
    options: dict[str, Any],
    args: argparse.Namespace,
    answers: TextIO | None,
) -> dict[str, Any]:
    """Counts of one category; prints the first `--show` wrong answers and writes all to the open file `answers`."""
    start = time.monotonic()
    right = tokens = shown = 0
    results = in_parallel(lambda item: run(client, item, options), items, args.concurrency)
    for item, (good, reply) in zip(items, results, strict=True):
        right += good
        tokens += reply.tokens
        if answers is not None:
            row = {"id": item["key"], "category": category, "answer": reply.text, "correct": good}
            answers.write(json.dumps(row) + "\n")
        if not good and shown < args.show:
            shown += 1
            print(f"  wrong: {item['messages'][-1]['content']!r} -> {reply.content!r} {reply.calls}", flush=True)
    seconds = time.monotonic() - start
    return {
        "items": len(items), "right": right, "percent": round(100 * right / len(items), 2), "tokens": tokens,
        "seconds": round(seconds, 1),
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this eval."""
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="", help="default: the first one that the server lists")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--category", action="append", default=[], help="only this one; may be repeated")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--limit", type=int, help="items per category, spread over all of them")
    amount.add_argument("--items", type=int, help="items in all, spread over the categories by their size")
    parser.add_argument("--answers", type=Path, help="file to write every answer to, one JSON line per item")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument(
        "--fields", type=json.loads, default={}, metavar="JSON",
        help='more fields of each request, such as {"chat_template_kwargs": {"thinking": true}}',
    )  # fmt: skip
    parser.add_argument("--show", type=int, default=0, help="wrong answers printed per category")


def main(args: argparse.Namespace) -> int:
    """Exit status 0 if every bar is met, else 1."""
    client = Client(base_url=args.base_url, model=args.model, api_key=args.api_key)
    if not client.model:
        client = Client(base_url=args.base_url, model=client.first_model(), api_key=args.api_key)
    options = {"temperature": args.temperature, "max_tokens": args.max_tokens} | args.fields
    print(f"{'category':15} {'items':>6} {'right':>6} {'per cent':>9} {'bar':>6} {'seconds':>8}", flush=True)
    categories = load(args.category, args.limit)
    if args.items is not None:
        categories = spread(categories, args.items)
    results = {}
    with open(args.answers, "w", encoding="utf-8") if args.answers else nullcontext() as answers:
        for name, items in categories.items():
            results[name] = evaluate(client, name, items, options, args, answers)
            bar, row = BARS.get(name), results[name]
            shown = f"{bar:6.0f}" if bar else "     -"
            print(
                f"{name:15} {row['items']:6} {row['right']:6} {row['percent']:9.2f} {shown} {row['seconds']:8.1f}",
                flush=True,
            )
    passed = all(results[name]["percent"] >= bar for name, bar in BARS.items() if name in results)
    print(json.dumps({"eval": "tiny", "model": client.model, "passed": passed, "categories": results}))
    return 0 if passed else 1
