"""Searches the plans of FP8 linear layers for few tokens on one GPU, with DeepSeek-V3's shapes.

    python -m benchmarks.sweep_fp8_rows --out FOLDER [--rows 1 4 16 64] [--tp 1] [--seconds 110]

A plan is a tile and the programs that each processor gets. Every case is compared with fp32 before it is timed, in CUDA
graphs and with weights that are not in the L2. "us" is the sum over the FP8 linear layers of a slice of eight layers
(one dense), "share" the part of 4.3 TB/s that their bytes over this time are. The likely plans come first, and the
search ends when its time does. Each line is printed at once; FOLDER/sweep_fp8_rows.json has all of them, the last line
the best of each number of rows.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import record
from benchmarks.bench_fp8_linear import BYTES_PER_S, MOST_COPIES, ROTATION_BYTES, TOLERANCE, microseconds, shapes
from model.fp8_linear import PLANS, Fp8Linear, LinearPlan, with_shares
from moe.device import num_processors
from moe.formats import Fp8BlockWeight

COUNTS = {
    "latents": 8, "q_b": 8, "o": 8, "dense gate_up": 1, "dense down": 1, "shared gate_up": 7, "shared down": 7,
}  # fmt: skip
SHARED_BYTES = 220 * 1024


class Case:
    """One shape: copies of a layer, its dense weight, and a number of rows at a time."""

    def __init__(self, name: str, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.is_gated = name.endswith("gate_up")
        weight = Fp8BlockWeight.quantize(torch.randn(shape, device="cuda"))
        self.nbytes = weight.nbytes
        num_copies = max(2, min(MOST_COPIES, math.ceil(ROTATION_BYTES / weight.nbytes)))
        self.layers = [Fp8Linear(weight, None, is_gated=self.is_gated) for _ in range(num_copies)]
        self.dense_NK = weight.dequantize()
        self.x_TK = torch.empty(0, shape[1], device="cuda")
        self.want = self.x_TK
        self.times: dict[LinearPlan, float] = {}

    def set_rows(self, num_rows: int) -> None:
        """New inputs, and what must come out."""
        self.x_TK = torch.randn(num_rows, self.shape[1], device="cuda").bfloat16()
        self.want = self.x_TK.float() @ self.dense_NK.mT
        if self.is_gated:
            gate, up = self.want.chunk(2, dim=-1)
            self.want = torch.nn.functional.silu(gate) * up
        self.times = {}

    def us(self, plan: LinearPlan) -> float:
        """Time of a call by the plan, with the shares that it gives this shape."""
        device = self.x_TK.device
        plan = with_shares(plan, self.x_TK.shape[0], *self.shape, num_processors(device, 1))
        if plan not in self.times:
            got = self.layers[0](self.x_TK, plan).float()
            error = float((got - self.want).norm() / self.want.norm())
            if not error < TOLERANCE:
                raise ValueError(f"{self.shape} by {plan}: relative error {error:.3g}")
            self.times[plan] = microseconds([lambda each=each: each(self.x_TK, plan) for each in self.layers])
        return self.times[plan]


def candidates(num_rows: int) -> Iterator[LinearPlan]:
    """The plan in use first, then its neighbours, then what is further away."""
    block_m = next(plan.block_m for plan in PLANS if num_rows <= plan.block_m)
    yield next(plan for plan in PLANS if plan.block_m == block_m)
    if block_m <= 16:
        tiles = [(64, 4, 6), (64, 4, 4), (128, 4, 4), (64, 4, 8), (64, 4, 3), (128, 4, 3), (128, 8, 4), (128, 4, 6)]
        numbers = (4, 3, 2, 6, 8)
    else:
        tiles = [(128, 8, 3), (128, 8, 4), (128, 4, 4), (256, 8, 3), (64, 4, 4), (128, 4, 3), (256, 8, 4), (64, 4, 6)]
        numbers = (2, 1, 3, 4)
    for (block_n, warps, stages), number in itertools.product(tiles, numbers):
        if (block_n * 128 + block_m * 256) * stages <= SHARED_BYTES:
            yield LinearPlan(block_n, block_m, warps, stages, per_processor=number)


def measure(cases: dict[str, Case], num_rows: int, plan: LinearPlan) -> dict[str, Any]:
    """One row of the record."""
    row: dict[str, Any] = {"rows": num_rows, "plan": str(plan)}
    try:
        row["each"] = {name: round(case.us(plan), 2) for name, case in cases.items()}
    except (ValueError, RuntimeError, triton.runtime.errors.OutOfResources) as error:
        return row | {"failed": str(error).splitlines()[0][:200]}
    row["us"] = round(sum(COUNTS[name] * us for name, us in row["each"].items()), 1)
    num_bytes = sum(COUNTS[name] * case.nbytes for name, case in cases.items())
    return row | {"share": round(num_bytes / row["us"] * 1e6 / BYTES_PER_S, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON file")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 64, 16, 4])
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks that the layers are divided between")
    parser.add_argument("--seconds", type=float, default=110)
    args = parser.parse_args()
    start = time.monotonic()
    results: list[dict[str, Any]] = []
    with torch.inference_mode():
        cases = {name: Case(name, shape) for name, shape in shapes(args.tp).items()}
        print(f"{time.monotonic() - start:.0f} s: weights are ready", flush=True)
        for index, num_rows in enumerate(args.rows):
            for case in cases.values():
                case.set_rows(num_rows)
            end = start + args.seconds * (index + 1) / len(args.rows)
            for plan in dict.fromkeys(candidates(num_rows)):
                if time.monotonic() > end:
                    break
                results.append(measure(cases, num_rows, plan))
                print(json.dumps(results[-1]), flush=True)
                record.write("sweep_fp8_rows", {"environment": record.environment(), "results": results}, args.out)
    done = [row for row in results if "us" in row]
    best = {
        n: min((row for row in done if row["rows"] == n), key=lambda row: row["us"], default=None) for n in args.rows
    }
    print(json.dumps(best))


if __name__ == "__main__":
    main()
