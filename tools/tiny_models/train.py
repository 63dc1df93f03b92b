"""One stage of a family's recipe, or a part of it, within a given time; goes on from a checkpoint.

    python -m tools.tiny_models train --family deepseek_v3 --stage 1 --minutes 9 --out run [--resume [FOLDER]]

`--minutes` is the time of the whole command. Where it ends first, the stage goes on with the next command. The learning
rate depends on the training seconds of the stage, so a stage is the same however often it is interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from tools.tiny_models import checkpoint
from tools.tiny_models.attend import DenseAttend, FlexAttend
from tools.tiny_models.checkpoint import Progress
from tools.tiny_models.families import FAMILIES, load_family
from tools.tiny_models.families.base import Family, Losses, Stage, Weights
from tools.tiny_models.generate import mean_loss
from tools.tiny_models.optim import Optimizer
from tools.tiny_models.stream import Stream

RESERVE_S = 15.0  # for writing the last checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--stage", type=int, required=True, help="1 is the first")
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole command, compiling included")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint is written to OUT/checkpoint")
    parser.add_argument(
        "--resume", nargs="?", const=True, metavar="FOLDER", help="go on from the checkpoint in FOLDER, or in OUT"
    )
    parser.add_argument("--init", type=Path, metavar="FOLDER", help="begin the stage with an exported model's weights")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="change the stage's settings")
    parser.add_argument("--config", type=Path, help="another config.json for trying out")
    parser.add_argument("--workers", type=int, default=15, help="processes that make data")
    parser.add_argument("--save-every", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--max-steps", type=int, help="end this command early")
    parser.add_argument("--attention", choices=("flex", "dense"), default="flex", help="dense runs on a CPU too")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="cuda")


class Trainer:
    """Weights, optimizer and the compiled pieces of one step."""

    def __init__(
        self, family: Family, stage: Stage, weights: Weights, device: str, *, compiles: bool, flex: bool
    ) -> None:
        self.family = family
        self._device = torch.device(device)
        self.on_gpu = self._device.type == "cuda"
        self.weights = {
            name: value.to(self._device).requires_grad_(family.is_trained(name)) for name, value in weights.items()
        }
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        trained = {name: value for name, value in self.weights.items() if value.requires_grad}
        self.optimizer = Optimizer(
            trained, family.is_matrix, muon_lr=stage.muon_lr, adam_lr=stage.adam_lr, decay=stage.decay
        )
        self._rope = family.rope_tables(stage.length, self._device)
        compiled: Callable[..., Any] = partial(torch.compile, dynamic=False) if compiles else (lambda f: f)
        family.compile(compiled)
        self._make_mask = compiled(create_block_mask)
        self._flex = flex

    def losses(self, batch: Tensor, rounding: str) -> Losses:
        """Of a batch [4, rows, length]; `rounding` is "" or one of the family's."""
        ids, targets, docs, positions = batch
        used = self.family.rounded(self.weights, rounding) if rounding else self.weights
        rope = (self._rope[0][positions][:, None], self._rope[1][positions][:, None])
        shape = self.family.shape
        attends: Any = FlexAttend(shape, docs, self._make_mask) if self._flex else DenseAttend(shape, docs)
        return self.family.losses(used, (ids, targets, docs, positions), rope, attends, self.dtype)

    def step(self, batch: Tensor, factor: float, rounding: str) -> Tensor:
        """One update; returns the cross-entropy. A factor of 0 changes nothing."""
        losses = self.losses(batch, rounding)
        losses.total.backward()
        self.optimizer.step(factor)
        if factor:
            self.family.after_step(self.weights, losses.statistics, factor)
        return losses.cross_entropy.detach()

    def load(self, batch: Any) -> Tensor:
        tensor = torch.from_numpy(batch)
        return (tensor.pin_memory() if self.on_gpu else tensor).to(self._device, non_blocking=True).long()


def roundings_of(family: Family, stage: Stage, share: float) -> tuple[str, ...]:
    """What steps take in turn at a share of the stage; "" rounds nothing."""
    return family.roundings if share >= stage.quantize_from else ("",)


def warm_up(trainer: Trainer, plain_family: Family, stage: Stage, first: Tensor) -> None:
    """Compiles everything before the clock starts, and compares it with a family that is not compiled.

    Raises:
        ArithmeticError: the compiled step is wrong.
    """
    begin = time.monotonic()
    needed = (*roundings_of(plain_family, stage, 0.0), *roundings_of(plain_family, stage, 1.0 - 1e-9))
    for rounding in dict.fromkeys(needed):
        weights = plain_family.rounded(trainer.weights, rounding) if rounding else trainer.weights
        plain = mean_loss(plain_family, weights, first)
        loss = float(trainer.step(first, 0.0, rounding))
        spent = time.monotonic() - begin
        print(f"{spent:.1f} s: loss {loss:.4f}, plain fp32 {plain:.4f}, rounding {rounding!r}", flush=True)
        if not abs(loss - plain) <= 0.02 + 0.02 * plain:
            raise ArithmeticError(f"the compiled step gives loss {loss}, the plain model {plain}")


class Report:
    """Prints a line now and then: the mean loss since the last one, and the speed."""

    def __init__(self, stage: Stage, every_s: float = 15.0) -> None:
        self._stage, self._every_s = stage, every_s
        self._start = self._shown = time.monotonic()
        self._losses: list[Tensor] = []
        self._steps = 0

    def step(self, loss: Tensor, share: float, waited_s: float, *, is_last: bool) -> None:
        """Takes a step's loss. Raises FloatingPointError where the mean is not finite."""
        self._losses.append(loss)
        self._steps += 1
        now = time.monotonic()
        if now - self._shown < self._every_s and not is_last:
            return
        mean = float(torch.stack(self._losses).mean())
        speed = self._steps * self._stage.rows * self._stage.length / (now - self._start)
        print(
            f"{now - self._start:6.1f} s stage {100 * share:.0f} % step {self._steps} loss {mean:.4f} rate "
            f"{self._stage.factor(share):.3f} {speed / 1e3:.0f}k tokens/s waited {waited_s:.1f} s", flush=True,
        )  # fmt: skip
        if not math.isfinite(mean):
            raise FloatingPointError(f"the mean loss is {mean} at step {self._steps} of this command")
        self._losses, self._shown = [], now


def train(args: argparse.Namespace, trainer: Trainer, stage: Stage, before: Progress, deadline: float) -> Progress:
    """Trains until the stage, the time or `--max-steps` is over; saves now and then."""
    stream = Stream(
        family=args.family, seed=f"{stage.seed}/{args.stage}/{before.runs}", workers=args.workers, rows=stage.rows,
        length=stage.length, chunk=math.gcd(16, stage.rows), shares=dict(stage.shares),
    )  # fmt: skip
    progress = replace(before, runs=before.runs + 1)
    try:
        warm_up(trainer, load_family(args.family, args.config), stage, trainer.load(stream.next()))
        report, steps, waited_s = Report(stage), 0, 0.0
        start = saved = time.monotonic()
        while (now := time.monotonic()) < deadline and steps != args.max_steps:
            spent_s = before.spent_s + now - start
            share = spent_s / stage.seconds
            if share >= 1:
                return replace(progress, spent_s=stage.seconds, is_done=True)
            batch = trainer.load(stream.next())
            waited_s += time.monotonic() - now
            names = roundings_of(trainer.family, stage, share)
            loss = trainer.step(batch, stage.factor(share), names[steps % len(names)])
            steps += 1
            tokens = before.tokens + steps * stage.rows * stage.length
            progress = replace(progress, spent_s=spent_s, steps=before.steps + steps, tokens=tokens)
            report.step(loss, share, waited_s, is_last=steps == args.max_steps)
            if time.monotonic() - saved > args.save_every:
                write(args.out, trainer, progress)
                saved = time.monotonic()
    finally:
        stream.close()
    return progress


def write(out: Path, trainer: Trainer, progress: Progress) -> None:
    checkpoint.save(out / "checkpoint", trainer.weights, trainer.optimizer.state(), progress)


def first_state(args: argparse.Namespace, family: Family) -> tuple[Weights, Weights, Progress]:
    """Fresh weights, or those of the checkpoint, at the stage that `--stage` names.

    Raises:
        ValueError: the checkpoint is of another family or another stage.
    """
    if args.init is not None and args.resume is None:
        return family.read(args.init), {}, Progress(family=family.name, stage=args.stage)
    if args.resume is None:
        if args.stage != 1:
            raise ValueError(f"--stage is {args.stage}: stages after the first need --resume or --init")
        return family.init_weights(family.stages[0].seed), {}, Progress(family=family.name, stage=1)
    folder = args.out if args.resume is True else Path(args.resume)
    weights, momenta, found = checkpoint.load(folder / "checkpoint" if (folder / "checkpoint").exists() else folder)
    if found.family != family.name:
        raise ValueError(f"--resume: {folder} is of family {found.family}, not {family.name}")
    wanted = found.stage + 1 if found.is_done else found.stage
    if args.stage != wanted:
        raise ValueError(f"--stage is {args.stage}: the checkpoint in {folder} goes on with stage {wanted}")
    spent_s = 0.0 if found.is_done else found.spent_s
    return weights, momenta, replace(found, stage=wanted, is_done=False, spent_s=spent_s)


def stage_of(args: argparse.Namespace, family: Family) -> Stage:
    """The stage with the changes of `--set`. Raises ValueError for an unknown stage or field."""
    if not 1 <= args.stage <= len(family.stages):
        raise ValueError(f"--stage is {args.stage}: {family.name} has {len(family.stages)} stages")
    stage = family.stages[args.stage - 1]
    changes = {name: json.loads(value) for name, _, value in (text.partition("=") for text in args.set)}
    unknown = changes.keys() - asdict(stage).keys()
    if unknown:
        raise ValueError(f"--set: a stage has no {sorted(unknown)}; it has {sorted(asdict(stage))}")
    return replace(stage, **changes)


def main(args: argparse.Namespace) -> int:
    """Train and say how far the stage is; the last line is JSON."""
    deadline = time.monotonic() + 60 * args.minutes - RESERVE_S
    family = load_family(args.family, args.config)
    stage = stage_of(args, family)
    torch.manual_seed(stage.seed)
    weights, momenta, progress = first_state(args, family)
    compiles = not args.no_compile and args.device != "cpu"
    trainer = Trainer(family, stage, weights, args.device, compiles=compiles, flex=args.attention == "flex")
    if momenta:
        trainer.optimizer.load(momenta)
    progress = train(args, trainer, stage, progress, deadline)
    write(args.out, trainer, progress)
    percent = round(100 * progress.spent_s / stage.seconds, 1)
    print(json.dumps(asdict(progress) | {"stage_percent": percent}), flush=True)
    return 0
