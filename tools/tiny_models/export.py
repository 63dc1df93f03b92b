"""Writes trained weights as a GPT-OSS checkpoint: MXFP4 experts, everything else bf16.

python -m tools.tiny_models.export --weights out/master --out assets/tiny-gpt-oss
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tools.tiny_models.model import EXPERT_WEIGHTS, Shape, Weights, init_weights
from tools.tiny_models.quant import fake_quantize, pack
from tools.tiny_models.render import ASSETS

PART_BYTES = 15_000_000


def is_expert(name: str) -> bool:
    return name.endswith(EXPERT_WEIGHTS)


def as_exported(weights: Weights) -> Weights:
    """fp32 weights with the values that the exported file holds."""
    return {
        name: fake_quantize(value.float()) if is_expert(name) else value.to(torch.bfloat16).float()
        for name, value in weights.items()
    }


def packed(weights: Weights) -> Weights:
    """The tensors of the published format."""
    out: Weights = {}
    for name, value in weights.items():
        if is_expert(name):
            out[name + "_blocks"], out[name + "_scales"] = pack(value)
        else:
            out[name] = value.to(torch.bfloat16)
    return {name: value.cpu().contiguous() for name, value in out.items()}


def save_master(weights: Weights, folder: Path) -> None:
    """Unquantized weights in bf16, to go on from, in several files below 15 MB each."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[Weights] = [{}]
    size = 0
    for name, value in weights.items():
        bytes_here = value.numel() * 2
        if size + bytes_here > PART_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = value.detach().to(torch.bfloat16).cpu().contiguous()
        size += bytes_here
    for number, tensors in enumerate(parts):
        save_file(tensors, folder / f"master-{number}.safetensors")


def load_master(folder: Path) -> Weights:
    """The weights that save_master wrote, as fp32."""
    weights: Weights = {}
    for path in sorted(folder.glob("master-*.safetensors")):
        weights |= {name: value.float() for name, value in load_file(path).items()}
    if not weights:
        raise FileNotFoundError(f"no master-*.safetensors in {folder}")
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--weights", type=Path, help="folder of the trainer's master weights; without it fresh ones")
    parser.add_argument("--out", type=Path, default=ASSETS)
    args = parser.parse_args()
    shape = Shape.load(ASSETS / "config.json")
    weights = load_master(args.weights) if args.weights else init_weights(shape)
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / "model.safetensors"
    save_file(packed(weights), target, metadata={"format": "pt"})
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
