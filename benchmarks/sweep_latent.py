"""Searches the tiles of latent attention (MLA) on one GPU, with DeepSeek-V3's heads and a bf16 cache.

    python -m benchmarks.sweep_latent --out FOLDER [--seconds 100] [--few]

Each tile is compared with torch in fp32 before it is timed, in CUDA graphs. First come all decodes by every tile, the
likely tiles first, then prompts; the search ends when its time does. With --few it times layers of 64 and 128 heads
(`latent_layers.py`) that decode 1, 2, 4 and 8 requests of 1,250 tokens instead, by tiles and numbers of parts, and
compares what comes out with what today's tile gives. Each line is printed at once, FOLDER/sweep_latent.json has all of
them, and the last line is the fastest tile of each case.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import record
from benchmarks.bench_attention import (
    BYTES_PER_S,
    FLOP_PER_S,
    LATENT,
    Case,
    Inputs,
    bytes_and_flop,
    decode_case,
    reference,
)
from benchmarks.bench_attention import measure as measure_backend
from benchmarks.latent_layers import LatentLayers, LatentStep, difference
from model.attention import tiles
from model.attention import triton as kernels
from model.attention.tiles import Tile
from moe.kernels.compile_ahead import compile_ahead

TODAY = tiles.LATENT_ON_HOPPER[-1][1]
TILES = (
    TODAY,
    Tile(rows=64, keys=64, warps=8, stages=3, per_processor=1),
    Tile(rows=64, keys=32, warps=8, stages=3, per_processor=1),
    Tile(rows=64, keys=32, warps=8, stages=4, per_processor=1),
    Tile(rows=16, keys=32, warps=4, stages=3, per_processor=2),
    Tile(rows=64, keys=32, warps=8, stages=5, per_processor=1),
    Tile(rows=32, keys=32, warps=4, stages=3, per_processor=2),
    Tile(rows=64, keys=16, warps=8, stages=4, per_processor=1),
    Tile(rows=64, keys=64, warps=8, stages=1, per_processor=1),
    Tile(rows=16, keys=64, warps=4, stages=2, per_processor=2),
    Tile(rows=16, keys=32, warps=4, stages=4, per_processor=3),
    Tile(rows=32, keys=64, warps=4, stages=2, per_processor=1),
    Tile(rows=32, keys=32, warps=8, stages=3, per_processor=2),
    Tile(rows=16, keys=64, warps=8, stages=3, per_processor=2),
    Tile(rows=64, keys=32, warps=4, stages=2, per_processor=1),
    Tile(rows=64, keys=128, warps=8, stages=1, per_processor=1),
)
FEW_TILES = (  # each with the most parts that the keys of a request are cut into
    (TODAY, 32),
    (Tile(rows=16, keys=32, warps=4, stages=3, per_processor=1), 32),
    (Tile(rows=16, keys=32, warps=4, stages=3, per_processor=2), 32),
    (Tile(rows=16, keys=32, warps=4, stages=3, per_processor=2), 64),
    (Tile(rows=16, keys=64, warps=4, stages=2, per_processor=1), 32),
    (Tile(rows=16, keys=64, warps=8, stages=2, per_processor=1), 32),
    (Tile(rows=16, keys=32, warps=8, stages=3, per_processor=1), 32),
    (Tile(rows=16, keys=16, warps=4, stages=4, per_processor=2), 64),
    (Tile(rows=32, keys=32, warps=4, stages=3, per_processor=1), 32),
    (Tile(rows=32, keys=32, warps=4, stages=3, per_processor=2), 32),
    (Tile(rows=32, keys=32, warps=8, stages=3, per_processor=1), 32),
    (Tile(rows=32, keys=32, warps=8, stages=3, per_processor=1), 64),
    (Tile(rows=64, keys=32, warps=8, stages=3, per_processor=1), 32),
    (Tile(rows=64, keys=32, warps=8, stages=3, per_processor=1), 64),
    (Tile(rows=64, keys=64, warps=8, stages=2, per_processor=1), 64),
)
FEW_HEADS, FEW_REQUESTS = (64, 128), (1, 2, 4, 8)
DECODES = [decode_case(*size) for size in ((64, 1000), (1, 1000), (64, 8000), (1, 8000), (8, 1000))]
PROMPTS = [Case("prefill 2048 of 8192 x 1", (2048,), (8192,))]


def measure(case: Case, tile: Tile, inputs: Inputs, want: torch.Tensor) -> dict[str, Any]:
    """One row of the record."""
    num_bytes, flop = bytes_and_flop(case, LATENT, torch.bfloat16)
    floor_us = max(num_bytes / BYTES_PER_S, flop / FLOP_PER_S) * 1e6
    row: dict[str, Any] = {"case": case.name, "tile": str(tile), "floor_us": round(floor_us, 2)}
    tiles.LATENT_ON_HOPPER = ((math.inf, tile),)
    try:
        row |= measure_backend(case, LATENT, "triton", inputs, want)
    except (RuntimeError, ValueError, triton.runtime.errors.OutOfResources) as error:
        row["failed"] = str(error).splitlines()[0][:200]
    return row


def sweep_few(end: float) -> list[dict[str, Any]]:
    """Tiles and parts of few requests, all compiled first; until `end` of the monotonic clock."""
    layers = {num_heads: LatentLayers(num_heads) for num_heads in FEW_HEADS}
    steps = [(layers[num_heads], layers[num_heads].step(size)) for num_heads in FEW_HEADS for size in FEW_REQUESTS]

    def compile_all() -> None:
        for tile, max_parts in FEW_TILES:
            tiles.LATENT_ON_HOPPER, kernels.MAX_PARTS = ((math.inf, tile),), max_parts
            for each, step in steps:
                each.run(step)

    compile_ahead("sweep_latent", compile_all, torch.device("cuda"))
    results: list[dict[str, Any]] = []
    wanted: dict[LatentStep, torch.Tensor] = {}
    for tile, max_parts in FEW_TILES:
        for each, step in steps if time.monotonic() < end else ():
            tiles.LATENT_ON_HOPPER, kernels.MAX_PARTS = ((math.inf, tile),), max_parts
            num_heads, num_requests = each.spec.num_heads, len(step.x_TH)
            parts = step.attention.num_parts(each.spec, num_requests, step.max_keys, tile)
            row: dict[str, Any] = {"case": f"{num_requests} x {num_heads} heads", "tile": str(tile)}
            row |= {"max_parts": max_parts, "parts": parts}
            try:
                time_us, result = each.measure(step)
                row |= {"us": round(time_us, 2), "difference": difference(result, wanted.setdefault(step, result))}
            except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
                row["failed"] = str(error).splitlines()[0][:200]
            results.append(row)
            print(json.dumps(row), flush=True)
    return results


def sweep(end: float, folder: Path) -> list[dict[str, Any]]:
    """Decodes, then prompts, until `end` of the monotonic clock."""
    results: list[dict[str, Any]] = []
    for cases in (DECODES, PROMPTS):
        given = {case: Inputs(case, LATENT, seed) for seed, case in enumerate(cases)}
        wanted = {case: reference(inputs, LATENT) for case, inputs in given.items()}
        for tile in TILES:
            for case in cases if time.monotonic() < end else ():
                results.append(measure(case, tile, given[case], wanted[case]))
                print(json.dumps(results[-1]), flush=True)
            record.write("sweep_latent", {"environment": record.environment(), "results": results}, folder)
        given.clear()
        torch.cuda.empty_cache()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON file")
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--few", action="store_true", help="few requests, by tiles and numbers of parts")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    results = sweep_few(end) if args.few else sweep(end, args.out)
    record.write("sweep_latent", {"environment": record.environment(), "results": results}, args.out)
    fastest: dict[str, dict[str, Any]] = {}
    for row in sorted((row for row in results if "us" in row), key=lambda row: -row["us"]):
        fastest[row["case"]] = row
    print(json.dumps(list(fastest.values())))


if __name__ == "__main__":
    main()
