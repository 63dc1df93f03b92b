"""Checkpoints of the trainer: weights, momenta and progress, in parts small enough to send around."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tools.tiny_models.families.base import Weights

PART_BYTES = 15_000_000
WEIGHT = "weight."


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the recipe is. `spent_s`: training seconds of the current stage; the others count from the beginning."""

    family: str
    stage: int
    spent_s: float = 0.0
    is_done: bool = False
    steps: int = 0
    tokens: int = 0
    runs: int = 0  # commands that trained; part of the data's seed, so that no run repeats another's data


def save(folder: Path, weights: Weights, momenta: Weights, progress: Progress) -> None:
    """Replaces the checkpoint in `folder`; until the new one is complete the old one stays."""
    tensors = {f"{WEIGHT}{name}": value for name, value in weights.items()} | momenta
    parts: list[Weights] = [{}]
    size = 0
    for name, value in tensors.items():
        num_bytes = value.numel() * value.element_size()
        if parts[-1] and size + num_bytes > PART_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = value.detach().cpu().contiguous()
        size += num_bytes
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for number, part in enumerate(parts):
        save_file(part, fresh / f"part-{number}.safetensors")
    (fresh / "progress.json").write_text(json.dumps(asdict(progress), indent=1))
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def load(folder: Path) -> tuple[Weights, Weights, Progress]:
    """Weights (fp32), momenta and progress. Raises FileNotFoundError where `folder` is no checkpoint."""
    if not (folder / "progress.json").is_file():
        raise FileNotFoundError(f"{folder}: no progress.json: name a folder that `train` wrote")
    tensors: Weights = {}
    for path in sorted(folder.glob("part-*.safetensors")):
        tensors |= load_file(path)
    weights = {name.removeprefix(WEIGHT): value for name, value in tensors.items() if name.startswith(WEIGHT)}
    momenta = {name: value for name, value in tensors.items() if not name.startswith(WEIGHT)}
    progress = Progress(**json.loads((folder / "progress.json").read_text()))
    return {name: value.to(torch.float32) for name, value in weights.items()}, momenta, progress
