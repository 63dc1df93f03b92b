"""One expert layer, backend by backend: checks the result against the fp32 twin, then times CUDA graphs.

    python -m benchmarks.bench_moe --compile && python -m benchmarks.bench_moe --tune-seconds 20 --out moe.json
    python -m benchmarks.bench_moe --sweep --models gpt-oss-20b --formats mxfp4 --tokens 1,16,4096 --out sweep.json

Without options: all models, formats, contenders and routings. `--sweep` times launch plans of our own kernels instead.
A row's time is the median over id sets of the time of a call (`moe_timing` says how it is taken); its floor is that of
its active experts. The last line printed is JSON.
"""

import argparse
import json
import logging
import subprocess
import time
from pathlib import Path

import torch

from benchmarks.moe_cases import CASES
from benchmarks.moe_contenders import FORMATS
from benchmarks.moe_groups import Group, batches
from benchmarks.moe_measure import LayerBench, Row, Settings
from benchmarks.moe_sweep import SearchSettings, search_batch
from benchmarks.moe_warm import Job, compile_all
from moe.cpu.threads import usable_cpus

DEVICE = torch.device("cuda")
MODELS = {
    "tiny-gpt-oss": ("mxfp4",),
    "gpt-oss-20b": ("mxfp4", "bf16"),
    "gpt-oss-20b-tp2": ("mxfp4",),
    "gpt-oss-120b": ("mxfp4", "bf16"),
    "deepseek-v3-quarter": ("fp8_block", "nvfp4"),
    "deepseek-v3-quarter-tp2": ("fp8_block",),
    "deepseek-v3": ("fp8_block", "nvfp4"),
}
_DEFAULTS = {"backends": list(FORMATS), "sets": 20}
_SWEEP_DEFAULTS = {"backends": ["triton"], "sets": 6}


def main() -> None:
    """Run what the arguments ask for and print rows as they come."""
    args = arguments()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    layers = [(model, name) for model in args.models for name in MODELS[model] if name in args.formats]
    if args.sweep:
        _sweep(layers, args)
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
    parser.add_argument("--backends", type=names, help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--routing", type=names, default=["uniform", "zipf"], help="of uniform, zipf")
    parser.add_argument("--sets", type=int, help="id sets per row")
    parser.add_argument("--tune-seconds", type=float, default=0.0, help="per library and layer; 0 tunes nothing")
    parser.add_argument("--compile", action="store_true", help="only compile what the same command would time")
    parser.add_argument("--sweep", action="store_true", help="time launch plans of the triton backend instead")
    parser.add_argument("--out", help="file for the JSON document")
    parser.add_argument("--commit", help="commit to note where git is not at hand")
    args = parser.parse_args(argv)
    for option, value in (_SWEEP_DEFAULTS if args.sweep else _DEFAULTS).items():
        if getattr(args, option) is None:
            setattr(args, option, value)
    choices = {"models": CASES, "formats": formats, "backends": FORMATS, "routing": ("uniform", "zipf")}
    for option, known in choices.items():
        for name in getattr(args, option):
            if name not in known:
                parser.error(f"--{option} {name}: known are {', '.join(known)}")
    for model in args.models:
        if not set(MODELS[model]) & set(args.formats):
            parser.error(f"--formats: {model} is measured in {', '.join(MODELS[model])}")
    if args.sweep and (args.backends != ["triton"] or args.compile or args.tune_seconds):
        parser.error(
            "--sweep times plans of triton alone: it takes no other --backends, no --compile, no --tune-seconds"
        )
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
        tune_seconds=args.tune_seconds, seed=torch.seed() % 2**31,
    )  # fmt: skip
    document = _Document(args, settings.seed)
    for model, format_name in layers:
        layer = LayerBench(case=CASES[model], format_name=format_name, settings=settings, device=DEVICE)
        rows = []
        for row in layer.rows():
            rows.append(row)
            print(_line(row), flush=True)
        document.add(rows, layer.failures)
        print(f"{model} {format_name}: {time.perf_counter() - begin:.0f} s so far", flush=True)
        del layer
        torch.cuda.empty_cache()
    document.print()


def _sweep(layers: list[tuple[str, str]], args: argparse.Namespace) -> None:
    settings = SearchSettings(kinds=args.routing, num_sets=args.sets, seed=torch.seed() % 2**31, device=DEVICE.type)
    document = _Document(args, settings.seed)
    tokens = tuple(sorted(set(args.tokens)))
    groups = [
        Group(model=model, format_name=format_name, tokens=tokens, num_sets=args.sets) for model, format_name in layers
    ]
    for batch in batches(groups, torch.cuda.mem_get_info()[0], usable_cpus()):
        document.add(*search_batch(batch, settings))
    document.print()


class _Document:
    """Rows with the environment that they come from. Written whenever some are added: they survive what comes."""

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self.out = args.out
        self.environment = {
            "card": torch.cuda.get_device_name(), "commit": args.commit or _commit(), "torch": torch.__version__,
            "input_seed": seed, "num_sets": args.sets,
        }  # fmt: skip
        self.rows: list[Row] = []
        self.failures: list[Row] = []

    def add(self, rows: list[Row], failures: list[Row]) -> None:
        self.rows += [row | self.environment for row in rows]
        self.failures += failures
        if self.out:
            Path(self.out).write_text(self._text() + "\n", encoding="utf-8")

    def print(self) -> None:
        """All of it if it is short."""
        counts = {"num_rows": len(self.rows), "num_failures": len(self.failures)}
        text = self._text()
        print(text if len(text) < 4000 else json.dumps({"environment": self.environment} | counts))

    def _text(self) -> str:
        return json.dumps({"environment": self.environment, "rows": self.rows, "failures": self.failures})


def _line(row: Row) -> str:
    return (
        f"{row['backend']:22} {row['routing']:8} {row['tokens']:5} tokens {row['active_experts']:5.1f} active "
        f"{row['us']:9.1f} us, floor {row['floor_us']:7.1f}, error {row['error']:.4f}, tuned {row['tuned']}"
    )


def _commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return result.stdout.strip()


if __name__ == "__main__":
    main()
