"""One expert layer, backend by backend: checks the result against the fp32 twin, then times CUDA graphs.

    python -m benchmarks.bench_moe --compile && python -m benchmarks.bench_moe --tune-seconds 20 --out moe.json
    python -m benchmarks.bench_moe --models gpt-oss-20b --formats mxfp4 --tokens 1,16 --backends triton --sweep

Without options: all models, formats, contenders and routings. A row's time is the median over id sets of the time of a
call (`moe_timing` says how it is taken); its floor is that of its active experts. The last line printed is JSON.
"""

import argparse
import json
import logging
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.moe_cases import CASES
from benchmarks.moe_contenders import FORMATS
from benchmarks.moe_measure import LayerBench, Settings
from benchmarks.moe_sweep import warm
from benchmarks.moe_warm import Job, compile_all

DEVICE = torch.device("cuda")
MODELS = {
    "tiny-gpt-oss": ("mxfp4",),
    "gpt-oss-20b": ("mxfp4", "bf16"),
    "gpt-oss-120b": ("mxfp4", "bf16"),
    "deepseek-v3-quarter": ("fp8_block", "nvfp4"),
    "deepseek-v3": ("fp8_block", "nvfp4"),
}


def main() -> None:
    """Run what the arguments ask for and print rows as they come."""
    args = arguments()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    layers = [(model, name) for model in args.models for name in MODELS[model] if name in args.formats]
    if args.warm:
        warm([(model, name, tokens) for model, name in layers for tokens in args.tokens])
    elif args.compile:
        for model, name in layers:
            compile_all(_jobs(model, name, args), torch.cuda.mem_get_info()[0])
            print(f"compiled {model} {name}", flush=True)
    else:
        _measure(layers, args)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parsed command line."""

    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", type=names, default=["gpt-oss-20b", "gpt-oss-120b", "deepseek-v3-quarter"])
    formats = sorted({name for some in MODELS.values() for name in some})
    parser.add_argument("--formats", type=names, default=formats, help="of those that a model is measured in")
    parser.add_argument("--tokens", type=numbers, default=[1, 4, 8, 16, 64, 256, 1024, 4096])
    parser.add_argument("--backends", type=names, default=list(FORMATS), help=", ".join(FORMATS))
    parser.add_argument("--routing", type=names, default=["uniform", "zipf"])
    parser.add_argument("--sets", type=int, default=20, help="id sets per row")
    parser.add_argument("--tune-seconds", type=float, default=0.0, help="per library and layer; 0 tunes nothing")
    parser.add_argument("--compile", action="store_true", help="only compile what the same command would time")
    parser.add_argument("--sweep", action="store_true", help="search launch plans of the triton backend")
    parser.add_argument("--warm", action="store_true", help="only compile what --sweep will start from; no times")
    parser.add_argument("--out", help="file for the JSON document")
    parser.add_argument("--commit", help="commit to note where git is not at hand")
    args = parser.parse_args(argv)
    choices = {"models": CASES, "formats": formats, "backends": FORMATS, "routing": ("uniform", "zipf")}
    for option, known in choices.items():
        for name in getattr(args, option):
            if name not in known:
                parser.error(f"--{option} {name}: known are {', '.join(known)}")
    for model in args.models:
        if not set(MODELS[model]) & set(args.formats):
            parser.error(f"--formats: {model} is measured in {', '.join(MODELS[model])}")
    if args.sweep and args.backends != ["triton"]:
        parser.error("--sweep searches plans of our own kernels: add --backends triton")
    return args


def _jobs(model: str, format_name: str, args: argparse.Namespace) -> list[Job]:
    """Bare forms of a contender run the kernels of the full one."""
    return [
        Job(model=model, format_name=format_name, backend=backend, tokens=tokens)
        for backend in args.backends
        if format_name in FORMATS[backend] and not backend.endswith("_bare")
        for tokens in args.tokens
    ]


def _measure(layers: list[tuple[str, str]], args: argparse.Namespace) -> None:
    begin = time.perf_counter()
    settings = Settings(
        tokens=args.tokens, backends=args.backends, kinds=args.routing, num_sets=args.sets,
        tune_seconds=args.tune_seconds, sweep=args.sweep, seed=torch.seed() % 2**31,
    )  # fmt: skip
    environment = {
        "card": torch.cuda.get_device_name(), "commit": args.commit or _commit(), "torch": torch.__version__,
        "input_seed": settings.seed, "num_sets": args.sets,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    for model, format_name in layers:
        layer = LayerBench(case=CASES[model], format_name=format_name, settings=settings, device=DEVICE)
        for row in layer.rows():
            rows.append(row | environment)
            print(_line(row) if not args.sweep else row, flush=True)
        failures += layer.failures
        print(f"{model} {format_name}: {time.perf_counter() - begin:.0f} s so far", flush=True)
        del layer
        torch.cuda.empty_cache()
        document = json.dumps({"environment": environment, "rows": rows, "failures": failures})
        if args.out:  # after every layer: what has been measured survives what comes
            Path(args.out).write_text(document + "\n", encoding="utf-8")
    short = {"environment": environment, "num_rows": len(rows), "num_failures": len(failures)}
    print(document if len(document) < 4000 else json.dumps(short))


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['backend']:22} {row['routing']:8} {row['tokens']:5} tokens {row['active_experts']:5.1f} active "
        f"{row['us']:9.1f} us, floor {row['floor_us']:7.1f}, error {row['error']:.4f}, tuned {row['tuned']}"
    )


def _commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return result.stdout.strip()


if __name__ == "__main__":
    main()
