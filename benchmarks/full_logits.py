"""Exact KL divergence between two settings of one model, over the whole vocabulary, in one process.

    python -m benchmarks.full_logits --b '{"dtype": "bfloat16"}' [--a '{}'] [--prompts 60] [--device cpu]

`--a` and `--b` are JSON: fields of `ModelSettings` (dtypes and backends by name). `python -m evals logits` compares
servers, which list 20 tokens each, so its divergence is a lower bound; this one is exact, and its last line of JSON has
both over the same logits, so it says how much that bound leaves out. The prompts are bundled questions.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.router_logits import run_prompt, tokenized
from evals.distributions import NUM_TOP, kl_lower_bound
from model.config import ModelSettings
from model.registry import build_model
from moe import MoeBackend

ROOT = Path(__file__).parents[1]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def settings_of(text: str, device: str) -> ModelSettings:
    """Raises ValueError for text that is no JSON object, or an unknown dtype or backend; TypeError for other fields."""
    fields: dict[str, Any] = json.loads(text)
    for name in ("dtype", "kv_dtype"):
        if fields.get(name, "auto") != "auto":
            if fields[name] not in DTYPES:
                raise ValueError(f"{name} is {fields[name]!r}: known are {', '.join(DTYPES)}")
            fields[name] = DTYPES[fields[name]]
    if "moe_backend" in fields:
        fields["moe_backend"] = MoeBackend(fields["moe_backend"])
    return ModelSettings(device=torch.device(device), selfcheck="off", **fields)


def divergence(first_TV: torch.Tensor, second_TV: torch.Tensor) -> torch.Tensor:
    """KL from first to second in nats, fp64 [T], of logits [T, V]."""
    p, q = (logits_TV.double().log_softmax(1) for logits_TV in (first_TV, second_TV))
    return (p.exp() * (p - q)).sum(1)


def lower_bounds(first_TV: torch.Tensor, second_TV: torch.Tensor) -> list[float]:
    """What two servers would let `evals logits` see of the same logits."""
    tops = []
    for logits_TV in (first_TV, second_TV):
        best = logits_TV.double().log_softmax(1).topk(min(NUM_TOP, logits_TV.shape[1]), dim=1)
        tops.append(
            [
                dict(zip(map(str, ids), values, strict=True))
                for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ]
        )
    return [kl_lower_bound(one, other) for one, other in zip(*tops, strict=True)]


def main(argv: list[str] | None = None) -> int:
    """Prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "assets" / "tiny-gpt-oss")
    parser.add_argument("--a", default="{}", metavar="JSON")
    parser.add_argument("--b", required=True, metavar="JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=60)
    args = parser.parse_args(argv)
    models = [build_model(args.model, settings_of(text, args.device)) for text in (args.a, args.b)]
    exact: list[float] = []
    bounds: list[float] = []
    same = 0
    for ids in tokenized(args.model, args.prompts):
        first_TV, second_TV = (run_prompt(model, ids) for model in models)
        exact += divergence(first_TV, second_TV).tolist()
        bounds += lower_bounds(first_TV, second_TV)
        same += int((first_TV.argmax(1) == second_TV.argmax(1)).sum())
    result = record.environment() | {
        "a": args.a, "b": args.b, "tokens": len(exact), "top1_agreement": round(same / len(exact), 5),
        "kl_mean": math.fsum(exact) / len(exact), "kl_max": max(exact),
        "kl_lower_bound_mean": math.fsum(bounds) / len(bounds), "kl_lower_bound_max": max(bounds),
    }  # fmt: skip
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
