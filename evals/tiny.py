"""Measures the bundled model's accuracy on items that its training never saw. Prints a table, then a line of JSON."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from evals.client import Answer, Client, add_server_arguments, in_parallel, json_object, make_client
from evals.files import check_can_write
from evals.results import Item, Run
from evals.scoring import is_right

DATA = Path(__file__).parent / "data"
# Per cent; categories without a bar are reported only.
BARS = {"addition": 95.0, "facts": 98.0, "sorting": 95.0, "reversing": 95.0, "tools": 90.0}


def load(categories: list[str], limit: int | None) -> dict[str, list[dict[str, Any]]]:
    """The items by category; a limit picks the same ones every time.

    Raises:
        ValueError: an unknown category, or a limit below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"--limit is {limit}: it must be at least 1")
    found = {path.stem: path for path in sorted(DATA.glob("*.jsonl"))}
    unknown = [name for name in categories if name not in found]
    if unknown:
        raise ValueError(f"unknown categories {unknown}: there are {sorted(found)}")
    items = {}
    for name in categories or list(found):
        lines = found[name].read_text(encoding="utf-8").rstrip("\n").split("\n")
        step = max(1, len(lines) // limit) if limit else 1
        items[name] = [json.loads(line) for line in lines[::step][:limit]]
    return items


def spread(
    items: dict[str, list[dict[str, Any]]], count: int, *, flag: str = "--items"
) -> dict[str, list[dict[str, Any]]]:
    """`count` items spread evenly over all of them, so that each category keeps its share; the same ones every time.

    Raises:
        ValueError: there are fewer; the message names `flag`.
    """
    rows = [(name, item) for name, of_category in items.items() for item in of_category]
    if not 1 <= count <= len(rows):
        raise ValueError(f"{flag} is {count}: it must lie between 1 and {len(rows)}, the items there are")
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
    client: Client, category: str, items: list[dict[str, Any]], options: dict[str, Any], concurrency: int
) -> tuple[list[Item], int]:
    """The answers to the items of one category, and the number of tokens of them all."""
    results = in_parallel(lambda item: run(client, item, options), items, concurrency)
    answered, tokens = [], 0
    for item, (good, reply) in zip(items, results, strict=True):
        tokens += reply.tokens
        answered.append(
            Item(
                id=item["key"], category=category, answer=reply.text, score=float(good),
                prompt="\n".join(message["content"] or "" for message in item["messages"]),
                expected=json.dumps(item["check"]),
                details={"reasoning": reply.reasoning, "finish_reason": reply.finish_reason},
            )
        )  # fmt: skip
    return answered, tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this eval."""
    add_server_arguments(parser)
    parser.add_argument("--category", action="append", default=[], help="only this one; may be repeated")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--limit", type=int, help="items per category, spread over all of them")
    amount.add_argument("--items", type=int, help="items in all, spread over the categories by their size")
    parser.add_argument("--answers", type=Path, help="file to write the run to, for `evals compare`")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument(
        "--fields", type=json_object, default={}, metavar="JSON",
        help='more fields of each request, such as {"chat_template_kwargs": {"thinking": true}}',
    )  # fmt: skip
    parser.add_argument("--show", type=int, default=0, help="wrong answers printed per category")


def main(args: argparse.Namespace) -> int:
    """Exit status 0 if every bar is met, else 1."""
    categories = load(args.category, args.limit)
    if args.items is not None:
        categories = spread(categories, args.items)
    if args.answers:
        check_can_write("--answers", args.answers)
    client = make_client(args)
    options = {"temperature": args.temperature, "max_tokens": args.max_tokens} | args.fields
    print(f"{'category':15} {'items':>6} {'right':>6} {'per cent':>9} {'bar':>6} {'seconds':>8}", flush=True)
    results, answered = {}, []
    for name, items in categories.items():
        start = time.monotonic()
        of_category, tokens = evaluate(client, name, items, options, args.concurrency)
        answered += of_category
        for item in [item for item in of_category if not item.score][: args.show]:
            print(f"  wrong: {item.prompt!r} -> {item.answer!r}")
        right = sum(item.score == 1 for item in of_category)
        percent, seconds = round(100 * right / len(items), 2), round(time.monotonic() - start, 1)
        results[name] = {
            "items": len(items), "right": right, "percent": percent, "tokens": tokens, "seconds": seconds,
        }  # fmt: skip
        shown = f"{BARS[name]:6.0f}" if name in BARS else "     -"
        print(f"{name:15} {len(items):6} {right:6} {percent:9.2f} {shown} {seconds:8.1f}", flush=True)
    passed = all(results[name]["percent"] >= bar for name, bar in BARS.items() if name in results)
    if args.answers:
        server = {"base_url": client.base_url, "model": client.model}
        Run(eval="tiny", settings=options, server=server, items=answered).write(args.answers)
    print(json.dumps({"eval": "tiny", "model": client.model, "passed": passed, "categories": results}))
    return 0 if passed else 1
