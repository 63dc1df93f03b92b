"""Trains the bundled model for a given time and writes master weights, the exported file and an evaluation.

    python -m tools.tiny_models.train --minutes 7 --out out [--init out/master]
Runs on one GPU; --device cpu with a small --rows is for trying the code out.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from tools.tiny_models.attend import DenseAttend, FlexAttend
from tools.tiny_models.evaluate import evaluate, table
from tools.tiny_models.export import as_exported, is_expert, load_master, packed, save_master
from tools.tiny_models.generate import mean_loss
from tools.tiny_models.mix import held_out
from tools.tiny_models.model import Shape, Weights, block, hidden_states, init_weights, rope_tables
from tools.tiny_models.optim import Optimizer
from tools.tiny_models.quant import straight_through
from tools.tiny_models.render import ASSETS
from tools.tiny_models.stream import Stream

BALANCE = 0.01  # weight of the load-balance loss


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=7.0, help="training time, without compiling and evaluating")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="folder with master weights to go on from")
    parser.add_argument("--config", type=Path, default=ASSETS / "config.json", help="another one for trying out")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--decay", type=float, default=0.05, help="weight decay of the matrices")
    parser.add_argument("--warmup", type=float, default=0.01, help="share of the time")
    parser.add_argument("--cooldown", type=float, default=0.6, help="share of the time in which the rate falls to zero")
    parser.add_argument("--quantize-from", type=float, default=0.4, help="share of the time before rounding")
    parser.add_argument("--shares", default="{}", help="JSON: other weights of the generators, see mix.py")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=1000, help="held-out items per category")
    parser.add_argument("--attention", choices=("flex", "dense"), default="flex", help="dense runs on a CPU too")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


class Trainer:
    """Weights, optimizer and the compiled pieces of one step."""

    def __init__(self, args: argparse.Namespace, shape: Shape, weights: Weights) -> None:
        self._shape, self._device = shape, torch.device(args.device)
        self.on_gpu = self._device.type == "cuda"
        self.weights = {name: value.to(self._device).requires_grad_() for name, value in weights.items()}
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.optimizer = Optimizer(self.weights, muon_lr=args.muon_lr, adam_lr=args.adam_lr, decay=args.decay)
        self._rope = rope_tables(shape, args.length, self._device)
        compiled: Callable[..., Any] = partial(torch.compile, dynamic=False) if self.on_gpu else (lambda f: f)
        self._block = compiled(block)
        self._round = compiled(straight_through)
        self._make_mask = compiled(create_block_mask)
        self._flex = args.attention == "flex"
        self._head = compiled(head_loss)

    def loss(self, batch: Tensor, quantized: bool) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the trained positions and the load-balance loss of a batch [4, rows, length]."""
        ids, targets, docs, positions = batch
        used = {n: self._round(v) if quantized and is_expert(n) else v for n, v in self.weights.items()}
        rope = (self._rope[0][positions][:, None], self._rope[1][positions][:, None])
        attends: Any = FlexAttend(self._shape, docs, self._make_mask) if self._flex else DenseAttend(self._shape, docs)
        states, balance = hidden_states(self._shape, used, ids, rope, attends, self.dtype, self._block)
        return self._head(used["lm_head.weight"], states, targets), balance

    def step(self, batch: Tensor, factor: float, quantized: bool) -> Tensor:
        loss, balance = self.loss(batch, quantized)
        (loss + BALANCE * balance).backward()
        self.optimizer.step(factor)
        return loss.detach()

    def load(self, batch: Any) -> Tensor:
        tensor = torch.from_numpy(batch)
        return (tensor.pin_memory() if self.on_gpu else tensor).to(self._device, non_blocking=True).long()


def head_loss(head: Tensor, states: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the trained positions; half of the positions hold all of them, nearly always."""
    flat = targets.flatten()
    room = flat.numel() // 2
    chosen = torch.argsort((flat < 0).to(torch.uint8), stable=True)[:room]
    scores = F.linear(states.flatten(0, 1)[chosen], head.to(states.dtype)).float()
    wanted = flat[chosen]
    return F.cross_entropy(scores, wanted, ignore_index=-1)


def rate(progress: float, warmup: float, cooldown: float) -> float:
    """The learning-rate factor: up, constant, then linearly to zero."""
    return max(0.0, min(1.0, progress / warmup if warmup else 1.0, (1 - progress) / cooldown))


def train(args: argparse.Namespace, shape: Shape, trainer: Trainer) -> dict[str, float]:
    """Trains until the time is over; prints a line every few seconds."""
    stream = Stream(
        seed=args.seed, workers=args.workers, rows=args.rows, length=args.length, chunk=min(16, args.rows),
        shares=json.loads(args.shares),
    )  # fmt: skip
    begin = time.time()
    first = trainer.load(stream.next())
    rounded_only = args.quantize_from <= 0
    plain = mean_loss(shape, as_exported(trainer.weights) if rounded_only else trainer.weights, first)
    # Compiles everything before the clock starts; factor 0 changes nothing.
    for quantized in (True,) if rounded_only else (True, False):
        loss = float(trainer.step(first, 0.0, quantized))
        print(f"{time.time() - begin:.1f} s: loss {loss:.4f}, plain fp32 {plain:.4f}, rounding {quantized}", flush=True)
    if abs(loss - plain) > 0.02 + 0.02 * plain:
        raise ArithmeticError(f"the compiled step gives loss {loss}, the plain model {plain}")
    start, last, steps, seconds = time.time(), 0.0, 0, args.minutes * 60
    waited = 0.0
    total = torch.zeros((), device=trainer._device)
    counted = 0
    while (spent := time.time() - start) < seconds:
        asked = time.time()
        batch = stream.next()
        waited += time.time() - asked
        progress = spent / seconds
        factor = rate(progress, args.warmup, args.cooldown)
        total += trainer.step(trainer.load(batch), factor, progress >= args.quantize_from)
        steps, counted = steps + 1, counted + 1
        if counted == 50 or spent - last > 20:
            mean = float(total) / counted
            speed = steps * args.rows * args.length / (time.time() - start)
            if spent - last > 15 or steps <= 100:
                print(
                    f"{spent:6.1f} s step {steps} loss {mean:.4f} rate {factor:.3f} {speed / 1e3:.0f}k tokens/s "
                    f"waited {waited:.1f} s", flush=True,
                )  # fmt: skip
                last = spent
            if not math.isfinite(mean):
                raise FloatingPointError(f"loss is {mean} at step {steps}")
            total.zero_()
            counted = 0
    stream.close()
    return {"steps": steps, "tokens": steps * args.rows * args.length, "seconds": round(time.time() - start, 1)}


def finish(args: argparse.Namespace, shape: Shape, weights: Weights, summary: dict[str, float]) -> None:
    """Writes the files first, then evaluates master and exported weights."""
    args.out.mkdir(parents=True, exist_ok=True)
    save_master(weights, args.out / "master")
    save_file(packed(weights), args.out / "model.safetensors", metadata={"format": "pt"})
    begin = time.time()
    items = held_out(0, args.limit)
    items["facts"] = items["facts"][: 5 * args.limit]
    rounded = as_exported(weights)
    master = evaluate(shape, weights, items)
    exported = evaluate(shape, rounded, items, show=6)
    warm = evaluate(shape, rounded, {name: found[:200] for name, found in items.items()}, temperature=1.0)
    print(table(master, exported))
    print("temperature 1:", warm)
    report = summary | {"master": master, "mxfp4": exported, "temperature_1": warm}
    report["evaluation_seconds"] = round(time.time() - begin, 1)
    (args.out / "report.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report), flush=True)


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    shape = Shape.load(args.config)
    weights = load_master(args.init) if args.init else init_weights(shape, args.seed)
    trainer = Trainer(args, shape, weights)
    summary = train(args, shape, trainer)
    finish(args, shape, {name: value.detach() for name, value in trainer.weights.items()}, summary)


if __name__ == "__main__":
    main()
