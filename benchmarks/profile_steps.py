"""Where a step's time goes on a GPU: microseconds and launches of each kernel, and the time the device idles.

    python -m benchmarks.profile_steps --model FOLDER [--streams 1 8 64 256] [--context 1000] [--steps 16]
        [--prefill 8192] [--out profile_steps] [--folder FOLDER]

Runs the engine in this process with random weights (`--load-format auto` for real ones), so HTTP has no part in it.
Decode rows: all requests decode; the steps are traced by torch's profiler, and timed again without it.
The prefill row: one prompt in one step. "idle" is wall time minus the time in which a kernel ran.
"""

import argparse
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import record
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.types import EngineRequest, SamplingParams

_FIRST_ID = 200  # special tokens are below, in every bundled tokenizer


def add_requests(core: EngineCore, num: int, length: int, max_tokens: int, rng: random.Random) -> list[str]:
    """Queue greedy requests with random prompts; returns their ids."""
    ids = [f"{rng.getrandbits(64):x}" for _ in range(num)]
    highest = core._runner.model.vocab_size - 1
    for request_id in ids:
        prompt = [rng.randint(_FIRST_ID, highest) for _ in range(length)]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        core.add(EngineRequest(request_id=request_id, prompt_ids=prompt, sampling=sampling))
    return ids


def step_until_decoding(core: EngineCore, num: int) -> None:
    """Run steps until every one of `num` requests has brought a token."""
    seen: set[str] = set()
    while len(seen) < num:
        seen |= {output.request_id for output in core.step() if output.token_ids}


def abort_all(core: EngineCore, ids: list[str]) -> None:
    """End the requests and empty the core."""
    for request_id in ids:
        core.abort(request_id)
    while core.has_work:
        core.step()


def busy_us(intervals: list[tuple[float, float]]) -> float:
    """Time covered by at least one interval."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def trace(core: EngineCore, num_steps: int) -> dict[str, Any]:
    """Kernels of so many steps, per step; the longest first."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            core.step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    intervals = []
    for event in profiler.events() or []:
        if str(event.device_type).endswith("CUDA") and event.device_time_total > 0:
            kernels[event.name].append(event.device_time_total)
            intervals.append((event.time_range.start, event.time_range.end))
    rows = [
        {
            "kernel": name[:120],
            "launches": round(len(times) / num_steps, 2),
            "us": round(sum(times) / num_steps, 2),
            "us_each": round(statistics.mean(times), 2),
        }
        for name, times in kernels.items()
    ]
    rows.sort(key=lambda row: -float(str(row["us"])))
    return {
        "launches": round(sum(map(len, kernels.values())) / num_steps, 1),
        "kernel_us": round(sum(map(sum, kernels.values())) / num_steps, 1),
        "busy_us": round(busy_us(intervals) / num_steps, 1),
        "kernels": rows,
    }


def timed_us(core: EngineCore, num_steps: int) -> float:
    """Median wall time of a step in microseconds, without the profiler."""
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        core.step()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def measure_decode(core: EngineCore, num: int, context: int, num_steps: int, rng: random.Random) -> dict[str, Any]:
    """One row: `num` requests that decode after a prompt of `context` tokens."""
    ids = add_requests(core, num, context, 8 * num_steps + 64, rng)
    step_until_decoding(core, num)
    for _ in range(4):
        core.step()
    wall_us = timed_us(core, 2 * num_steps)
    row = {"step": "decode", "streams": num, "context": context, "wall_us": round(wall_us, 1), **trace(core, num_steps)}
    row["idle_us"] = round(wall_us - float(row["busy_us"]), 1)
    abort_all(core, ids)
    return row


def measure_prefill(core: EngineCore, length: int, rng: random.Random) -> dict[str, Any]:
    """One row: a prompt of `length` tokens; the first of three, untraced, compiles what is new."""
    walls = []
    for _ in range(3):
        ids = add_requests(core, 1, length, 2, rng)
        torch.cuda.synchronize()
        start = time.perf_counter()
        step_until_decoding(core, 1)
        walls.append(1e6 * (time.perf_counter() - start))
        abort_all(core, ids)
    ids = add_requests(core, 1, length, 2, rng)
    row = {"step": "prefill", "streams": 1, "context": length, "wall_us": round(min(walls), 1), **trace(core, 1)}
    row["idle_us"] = round(min(walls) - float(row["busy_us"]), 1)
    abort_all(core, ids)
    return row


def print_row(row: dict[str, Any], num_kernels: int) -> None:
    """The row's totals and its longest kernels."""
    print(
        f"\n{row['step']} {row['streams']} x {row['context']}: wall {row['wall_us']:.0f} us, "
        f"busy {row['busy_us']:.0f}, idle {row['idle_us']:.0f}, {row['launches']:.0f} launches"
    )
    for kernel in row["kernels"][:num_kernels]:
        print(f"  {kernel['us']:9.1f} us {kernel['launches']:7.1f} x {kernel['us_each']:8.2f}  {kernel['kernel'][:80]}")


def main() -> None:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="dummy")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, default=1000, help="tokens of a decoding request's prompt")
    parser.add_argument("--steps", type=int, default=16, help="traced steps of a decode row")
    parser.add_argument("--prefill", type=int, nargs="*", default=[8192], help="lengths of the prompts")
    parser.add_argument("--kernels", type=int, default=24, help="kernels to print of each row")
    parser.add_argument(
        "--expert-load", action="store_true", help="count tokens by expert, to compare with a run without"
    )
    parser.add_argument("--out", default="profile_steps", help="name of the JSON file")
    parser.add_argument("--folder", type=Path, default=record.RESULTS, help="where it goes")
    args = parser.parse_args()
    rng = random.Random(1)
    config = EngineConfig(
        model=args.model,
        load_format=args.load_format,
        max_num_seqs=max([1, *args.streams]),
        max_model_len=max([args.context + 8 * args.steps + 128, *(length + 8 for length in args.prefill)]),
        selfcheck="first",
        enable_prefix_caching=False,
        expert_load=args.expert_load,
    )
    core = EngineCore(config)
    rows = [measure_prefill(core, length, rng) for length in args.prefill]
    rows += [measure_decode(core, num, args.context, args.steps, rng) for num in args.streams]
    for row in rows:
        print_row(row, args.kernels)
    record.write(args.out, {**record.environment(), "model": args.model.name, "rows": rows}, args.folder)


if __name__ == "__main__":
    main()
