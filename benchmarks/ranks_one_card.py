"""Two ranks that share one GPU, over gloo: a bundled model must answer as one rank on the same GPU does.

    python -m benchmarks.ranks_one_card --out /tmp/ranks [--items 100] [--backends triton,torch] [--model FOLDER]

NCCL refuses two ranks on one GPU, so tensors cross through the host and no step is captured: this is about answers, not
speed. The last line is JSON. Exit status 1: something failed.
"""

import argparse
import json
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import record
from scripts.card_end_to_end import TINY, attempt, compare, run_tiny, show

NUM_PAGES = 4096  # ranks that share a GPU cannot measure what fits
DP2 = ("--data-parallel-size", "2", "--expert-parallel-size", "2")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one": (),
    "tp2": ("--tensor-parallel-size", "2"),
    "ep2": ("--tensor-parallel-size", "2", "--expert-parallel-size", "2"),
    "dp2-ep2": DP2,
    "dp2-ep2-eplb": (*DP2, "--enable-eplb", "--eplb-interval", "50"),
}


def run_backend(args: argparse.Namespace, backend: str) -> list[dict[str, Any]]:
    """All layouts with one backend, compared with its one rank; the rows as they come."""
    rows: list[dict[str, Any]] = []
    for name, flags in LAYOUTS.items():
        chosen = ("--device", args.device, "--num-pages", str(NUM_PAGES), *flags)
        run = partial(run_tiny, model=args.model)
        row = attempt("tiny", f"{backend}-{name}", run, args.out, f"{backend}-{name}", backend, args.items, *chosen)
        if rows:
            compare(args.out, row, rows[0], args.at_least)
        rows.append(row)
        show(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 where every layout answers as one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for answers and logs")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["triton", "flashinfer_mxfp4"])
    parser.add_argument("--model", type=Path, default=TINY, help="folder of a bundled model")
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--at-least", type=float, default=0.97, help="share of items with the very same answer")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [row for backend in args.backends for row in run_backend(args, backend)]
    passed = all(row["passed"] for row in rows)
    report = {**record.environment(), "passed": passed, "rows": rows}
    record.write("ranks_one_card", report, args.out)
    kept = ("name", "passed", "agreement", "right", "items", "worst_error", "error")
    sys.stdout.write(json.dumps({"passed": passed, "rows": [{k: r[k] for k in kept if k in r} for r in rows]}) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the services, too
    sys.exit(main())
