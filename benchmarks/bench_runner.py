"""What `MoeRunner.run` itself costs per call, eager: both kinds of path with kernels that do nothing.

    python -m benchmarks.bench_runner [--batches 400] [--calls 500] [--out NAME] [--folder FOLDER]

The empty kernels hand out a result that was allocated before. Each number is the median over batches of the mean of a
batch; the loop around the calls is measured the same way and taken off. Needs no GPU. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import record
from moe import ExpertShape, registry
from moe.config import MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.routing import StandardTopK
from moe.runner import MoeRunner
from moe.types import StandardCombineInput, StandardDispatchOutput

TARGETS_US = {"fused": 5.0, "three-part": 8.0}
HIDDEN = 64


class EmptyCore:
    """A runner core that hands its input on."""

    def __init__(self, config: MoeRunnerConfig) -> None:
        del config

    def run(self, core_input: Any, quant_info: Any, state: Any) -> Any:
        return core_input


def empty_runner(kind: str, device: torch.device) -> tuple[MoeRunner, StandardDispatchOutput]:
    """A runner whose path of that kind is empty, and one token for it."""
    config = MoeRunnerConfig(shape=ExpertShape(num_experts=4, hidden_size=HIDDEN, intermediate_size=HIDDEN, top_k=1))
    topk = StandardTopK(torch.ones(1, 1, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device))
    dispatched = StandardDispatchOutput(torch.zeros(1, HIDDEN, device=device), topk)
    result = StandardCombineInput(torch.zeros(1, HIDDEN, device=device))

    def fused(dispatched: Any, quant_info: Any, config: Any, state: Any) -> StandardCombineInput:
        return result

    def pre(dispatched: Any, quant_info: Any, config: Any, state: Any) -> Any:
        return dispatched

    def post(core_output: Any, dispatched: Any, quant_info: Any, config: Any, state: Any) -> StandardCombineInput:
        return result

    parts = {
        "fused_func": lambda a2a, backend: fused if kind == "fused" else None,
        "three_part": lambda dispatch_format, backend: (pre, EmptyCore, post),
        "missing_formats": lambda backend, a2a, formats: [],
    }
    with mock.patch.multiple(registry, **parts):
        return MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, config), dispatched


def us_per_call(call: Callable[[], Any], num_batches: int, num_calls: int) -> float:
    """Median over batches of a batch's mean, in microseconds."""
    means = []
    for _ in range(num_batches):
        start = time.perf_counter_ns()
        for _ in range(num_calls):
            call()
        means.append((time.perf_counter_ns() - start) / num_calls / 1e3)
    return statistics.median(means)


def measure(device: torch.device, num_batches: int, num_calls: int) -> dict[str, float]:
    """Microseconds per `run` of either kind of path."""
    times = {}
    for kind in TARGETS_US:
        runner, dispatched = empty_runner(kind, device)
        quant_info = object()

        def nothing(dispatched: Any = dispatched, quant_info: Any = quant_info) -> None:
            return None

        def run(runner: MoeRunner = runner, dispatched: Any = dispatched, quant_info: Any = quant_info) -> None:
            runner.run(dispatched, quant_info)

        loop_us = us_per_call(nothing, num_batches, num_calls)
        times[kind] = round(us_per_call(run, num_batches, num_calls) - loop_us, 3)
    return times


def main() -> None:
    """Measure, compare with the targets, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--calls", type=int, default=500, help="calls of a batch")
    parser.add_argument("--out", default="runner", help="name of the JSON file")
    parser.add_argument("--folder", type=Path, default=record.RESULTS, help="where it goes")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times = measure(device, args.batches, args.calls)
    for kind, us in times.items():
        print(f"{kind:12} {us:6.2f} us per call, target {TARGETS_US[kind]:.0f}")
    result = {**record.environment(), "us_per_call": times, "targets_us": TARGETS_US}
    record.write(args.out, result, args.folder)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
