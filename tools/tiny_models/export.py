"""A checkpoint's weights as the published files: `python -m tools.tiny_models export --family F --out O`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.tiny_models import checkpoint
from tools.tiny_models.families import FAMILIES, load_family


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--weights", type=Path, help="folder of a checkpoint; without it fresh weights")
    parser.add_argument("--out", type=Path, required=True, help="the model folders are written below it")


def main(args: argparse.Namespace) -> int:
    family = load_family(args.family)
    weights = checkpoint.load(args.weights)[0] if args.weights else family.init_weights(0)
    for folder in family.export(weights, args.out):
        print(f"{folder}: {sum(path.stat().st_size for path in folder.iterdir()) / 1e6:.2f} MB")
    return 0
