"""The model cards of both exports: what each model is, how it was trained, and what it scored.

Every number comes from config, weights, progress or a report of `evaluate`; the prose is in `files/card.md`.
"""

from __future__ import annotations

from dataclasses import asdict
from string import Template
from typing import Any

from tools.tiny_models.checkpoint import Progress
from tools.tiny_models.families.base import Weights
from tools.tiny_models.families.deepseek_v3.dialect import FILES
from tools.tiny_models.families.deepseek_v3.export import NAMES
from tools.tiny_models.families.deepseek_v3.model import Shape

VARIANTS = {"fp8": ("master", "fp8"), "nvfp4": ("master", "w4a16", "w4a4")}
FORMATS = {
    "fp8": "FP8 (E4M3) in blocks of 128 x 128 with `weight_scale_inv`, as DeepSeek publishes; the rest in bf16",
    "nvfp4": "MLPs in NVFP4 with calibrated input scales, as ModelOpt writes; the rest in bf16",
}
COLUMNS = {
    "master": "before quantization", "fp8": "FP8, this file", "w4a16": "NVFP4, this file",
    "w4a4": "NVFP4 with activations in NVFP4 too",
}  # fmt: skip


def num_parameters(shape: Shape, weights: Weights) -> tuple[int, int, int]:
    """Of the model itself, of those a token uses, and of the prediction layer without its copies."""
    ahead = f"model.layers.{shape.layers}."
    own = {name: value.numel() for name, value in weights.items() if not name.startswith(ahead)}
    routed = sum(size for name, size in own.items() if ".mlp.experts." in name)
    total = sum(own.values())
    idle = routed * (shape.experts - shape.top_k) // shape.experts
    return total, total - idle, sum(value.numel() for value in weights.values()) - total


def card(kind: str, shape: Shape, weights: Weights, num_bytes: int, progress: Progress, report: dict[str, Any]) -> str:
    """README.md of one export. `num_bytes` is the size of its other files; `report` is what `evaluate --out` wrote.

    Raises:
        ValueError: the report lacks a variant of this export.
    """
    total, active, ahead = num_parameters(shape, weights)
    rope = shape.rope
    stretched = {"factor": f"{rope['factor']:g}", "original": f"{rope['original_max_position_embeddings']:,}"}
    trained = {"billions": f"{progress.tokens / 1e9:.2f}", "steps": f"{progress.steps:,}", "runs": progress.runs}
    figures = {"total": total, "active": active, "ahead": ahead, "megabytes": num_bytes}
    others = {
        "name": NAMES[kind], "other": NAMES["nvfp4" if kind == "fp8" else "fp8"], "format": FORMATS[kind],
        "vocab": f"{shape.vocab:,}", "context": f"{rope['factor'] * rope['original_max_position_embeddings']:,.0f}",
        "limit": report["limit"], "split": report["split"], "scores": scores(kind, report),
    }  # fmt: skip
    in_millions = {name: f"{number / 1e6:.2f}" for name, number in figures.items()}
    text = Template((FILES / "card.md").read_text(encoding="utf-8"))
    return text.substitute(asdict(shape) | stretched | trained | in_millions | others)


def scores(kind: str, report: dict[str, Any]) -> str:
    """The report's table of one export: categories down; modes and variants across."""
    results = report["results"]
    modes = list(dict.fromkeys(name.split()[0] for name in results))
    columns = [(mode, variant) for mode in modes for variant in VARIANTS[kind]]
    if missing := [f"{mode} {variant}" for mode, variant in columns if f"{mode} {variant}" not in results]:
        raise ValueError(f"the report has no {', '.join(missing)}: run evaluate without --variant")
    heads = [f"{mode}: {COLUMNS[variant]}" for mode, variant in columns]
    lines = [f"| category | {' | '.join(heads)} |", "| --- |" + " --- |" * len(columns)]
    for category in results[" ".join(columns[0])]:
        row = (f"{results[f'{mode} {variant}'][category]:.1f}" for mode, variant in columns)
        lines.append(f"| {category} | {' | '.join(row)} |")
    return "\n".join(lines)
