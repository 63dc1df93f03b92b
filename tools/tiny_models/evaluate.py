"""Accuracy on the held-out items with the trainer's own model, for master and exported weights alike.

python -m tools.tiny_models.evaluate --weights out/master --limit 200
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path

import torch

from evals.scoring import is_right
from tools.tiny_models.example import Example
from tools.tiny_models.export import as_exported, load_master
from tools.tiny_models.generate import write
from tools.tiny_models.mix import held_out
from tools.tiny_models.model import Shape, Weights
from tools.tiny_models.render import ASSETS, load_encoder, prompt_of

STOP = ("<|return|>", "<|call|>", "<|endoftext|>")
BARS = {"addition": 95.0, "facts": 98.0, "sorting": 95.0, "reversing": 95.0, "tools": 90.0}
CALL = re.compile(r"commentary to=functions\.(\S+) <\|constrain\|>json<\|message\|>(.*?)<\|call\|>", re.DOTALL)
FINAL = re.compile(r"<\|channel\|>final<\|message\|>(.*?)<\|return\|>", re.DOTALL)


def read(text: str) -> tuple[str, list[tuple[str, str]]]:
    """The final content and the calls in what the model wrote; malformed Harmony gives neither."""
    final = FINAL.search(text)
    return (final.group(1) if final else ""), CALL.findall(text)


def evaluate(
    shape: Shape, weights: Weights, items: dict[str, list[Example]], *, batch: int = 512,
    dtype: torch.dtype = torch.float32, temperature: float = 0.0, show: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Per cent right for each category; prints the first `show` failures of each."""
    encoder = load_encoder()
    stop = {encoder.text(token)[0] for token in STOP}
    scores = {}
    for category, examples in items.items():
        prompts = [encoder.text(prompt_of(example)) for example in examples]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        right, shown = 0, 0
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            written = write(
                shape, weights, [prompts[index] for index in chosen], stop=stop, dtype=dtype, temperature=temperature
            )
            for index, ids in zip(chosen, written, strict=True):
                text = encoder.decode(ids)
                content, calls = read(text)
                good = is_right(examples[index].check, content, calls)
                right += good
                if not good and shown < show:
                    shown += 1
                    asked = examples[index].messages[-2]["content"]
                    print(f"  wrong [{category}] {asked!r} -> {text!r} wanted {examples[index].check}", flush=True)
        scores[category] = round(100 * right / max(1, len(examples)), 2)
    return scores


def table(master: dict[str, float], exported: dict[str, float]) -> str:
    lines = [f"{'category':15} {'master':>8} {'mxfp4':>8} {'bar':>6}"]
    for name, score in master.items():
        lines.append(f"{name:15} {score:8.2f} {exported[name]:8.2f} {BARS.get(name, 0):6.0f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--weights", type=Path, required=True, help="folder of the trainer's master weights")
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=3, help="failures printed per category")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = Shape.load(ASSETS / "config.json")
    weights = {name: value.to(device) for name, value in load_master(args.weights).items()}
    items = {name: found[: args.limit] for name, found in held_out(args.seed, args.limit).items()}
    start = time.time()
    master = evaluate(shape, weights, items)
    exported = evaluate(shape, as_exported(weights), items, show=args.show)
    print(table(master, exported))
    print(json.dumps({"master": master, "mxfp4": exported, "seconds": round(time.time() - start, 1)}))


if __name__ == "__main__":
    main()
