"""What `moe-serve plan` says beside what a start on this GPU takes, in MiB.

    python -m benchmarks.plan_vs_start --gpu h200 [--out NAME] [--folder FOLDER] [-- FLAGS OF THE SERVICE]

Starts the service with the flags, reads what its engine measured from the log, and plans with the same flags for a GPU
of the same memory. "activations" are what a profile run took on top of the weights, its own small cache included; the
engine adds to them what the plan sets aside for sampling, graphs and their buffers. The last line is JSON.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import record
from engine.units import MIB
from scripts.card_end_to_end import NUM_SEQS, service

_GIB = 1024  # MiB
_WEIGHTS = re.compile(r"weights: (\d+) MiB on the GPU, at most (\d+) MiB while loading; (\d+) MiB are in use beside")
_STEP = re.compile(r"GPU memory: ([\d.]+) GiB in all, .* ([\d.]+) GiB for a step")
_GRAPHS = re.compile(r"captured .* ([\d.]+) GiB")
_CACHE = re.compile(r"KV cache: (\d+) tokens fit, (\d+) pages of \d+ tokens, (\d+) MiB")


class LogError(ValueError):
    """The log of a start lacks a line that was to be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One part of the memory in MiB; `actual` is None where a start does not measure it."""

    part: str
    planned: float
    actual: float | None

    def __str__(self) -> str:
        if self.actual is None:
            return f"{self.part:<20}{self.planned:>12.0f}{'-':>12}"
        ratio = f"{self.actual / self.planned:>9.2f}" if self.planned else f"{'-':>9}"
        return f"{self.part:<20}{self.planned:>12.0f}{self.actual:>12.0f}{ratio}"


def compare(plan: dict[str, Any], log: str) -> list[Row]:
    """The parts of `moe-serve plan --json` beside those in the log of a start. Raises LogError."""
    weights, peak, context = map(float, _groups(_WEIGHTS, log, "weights"))
    step = float(_groups(_STEP, log, "GPU memory")[1]) * _GIB
    tokens, pages, cache = map(float, _groups(_CACHE, log, "KV cache"))
    graphs = sum(float(size) for size in _GRAPHS.findall(log)) * _GIB
    estimates = {name: size / MIB for name, size in plan["estimates"].items()}
    planned = plan["kv_cache"]
    return [
        Row(part="weights", planned=plan["weights"]["processed"] / MIB, actual=weights),
        Row(part="peak while loading", planned=plan["weights"]["peak_while_loading"] / MIB, actual=peak),
        Row(part="context", planned=estimates["context"], actual=context),
        Row(
            part="activations",
            planned=estimates["activations"],
            actual=step - estimates["sampling"] - estimates["graphs"] - estimates["graph_buffers"],
        ),
        Row(part="sampling", planned=estimates["sampling"], actual=None),
        Row(part="graphs", planned=estimates["graphs"], actual=graphs),
        Row(part="graph buffers", planned=estimates["graph_buffers"], actual=None),
        Row(part="KV cache", planned=planned["bytes"] / MIB, actual=cache),
        Row(part="KV pages", planned=planned["pages"], actual=pages),
        Row(part="KV tokens", planned=planned["tokens"], actual=tokens),
    ]


def gpu_gib(log: str) -> float:
    """Memory of the GPU as the engine found it. Raises LogError."""
    return float(_groups(_STEP, log, "GPU memory")[0])


def _groups(pattern: re.Pattern[str], log: str, name: str) -> tuple[str, ...]:
    found = pattern.search(log)
    if found is None:
        raise LogError(f"the log has no line that begins with {name!r}; was the service started on a GPU?")
    return found.groups()


def _plan(gpu: str, memory_gib: float, flags: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "server", "plan", "--gpu", gpu, "--gpu-memory", str(memory_gib), "--json"]
    done = subprocess.run(
        [*command, "--max-num-seqs", str(NUM_SEQS), *flags], capture_output=True, text=True, check=False
    )
    if not done.stdout:
        raise LogError(f"moe-serve plan failed: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Start, plan, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", required=True, help="the card's name for moe-serve plan")
    parser.add_argument("--out", default="plan_vs_start")
    parser.add_argument("--folder", type=Path, default=record.RESULTS)
    parser.add_argument("flags", nargs="*", help="of the service, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log_file = Path(folder) / "start.log"
        with service(log_file, *args.flags):
            log = log_file.read_text(encoding="utf-8")
    plan = _plan(args.gpu, gpu_gib(log), args.flags)
    rows = compare(plan, log)
    print(f"{plan['model']} on {args.gpu}\n{'':<20}{'planned':>12}{'actual':>12}{'ratio':>9}")
    for row in rows:
        print(row)
    record.write(args.out, {**record.environment(), "rows": [asdict(row) for row in rows]}, args.folder)
    print(json.dumps({row.part: [round(row.planned), row.actual] for row in rows}))


if __name__ == "__main__":
    main()
