"""A checkpoint's weights as the published files: `python -m tools.tiny_models export --family F --out O`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tools.tiny_models import checkpoint
from tools.tiny_models.families import FAMILIES, load_family


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--weights", type=Path, help="folder of a checkpoint; without it fresh weights")
    parser.add_argument(
        "--report", type=Path, help="what `evaluate --out` wrote; with it the model cards are written too"
    )
    parser.add_argument("--out", type=Path, required=True, help="the model folders are written below it")


def main(args: argparse.Namespace) -> int:
    family = load_family(args.family)
    if args.report and not args.weights:
        raise ValueError("--report is given without --weights: name the checkpoint that was evaluated")
    weights, _, progress = checkpoint.load(args.weights) if args.weights else (family.init_weights(0), {}, None)
    report = json.loads(args.report.read_text()) if args.report else None
    for folder in family.export(weights, args.out):
        if report is not None and progress is not None:
            (folder / "README.md").write_text(family.card(folder, weights, progress, report), encoding="utf-8")
        for path in folder.iterdir():
            path.chmod(0o644)  # safetensors lets nobody else read its files, and a service may run as another user
        print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()) / 1e6:.2f} MB")
    return 0
