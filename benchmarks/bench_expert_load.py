"""What counting tokens by expert (`--expert-load`) costs a decode step on a GPU: two engines in one process, in turns.

    python -m benchmarks.bench_expert_load --model FOLDER [--streams 1 64 256] [--rounds 15] [--out expert_load]

Both engines have the same random weights and requests; one counts. They take turns, some steps each, and the first
changes every round. A row has the medians over the rounds and the median of the ratios within a round.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.profile_steps import abort_all, add_requests, step_until_decoding
from engine.config import EngineConfig
from engine.core import EngineCore

STEPS = 40  # of an engine's turn


def turn_us(core: EngineCore) -> float:
    """Microseconds of a step in one turn."""
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(STEPS):
        core.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / STEPS * 1e6


def measure(cores: list[EngineCore], num: int, context: int, rounds: int) -> dict[str, Any]:
    """One row: `num` requests that decode after prompts of `context` tokens."""
    requests = []
    for core in cores:
        requests.append(add_requests(core, num, context, STEPS * (rounds + 1) + 64, random.Random(num)))
        step_until_decoding(core, num)
        turn_us(core)
    times: list[list[float]] = [[], []]
    for index in range(rounds):
        for each in (0, 1) if index % 2 else (1, 0):
            times[each].append(turn_us(cores[each]))
    for core, ids in zip(cores, requests, strict=True):
        abort_all(core, ids)
    plain_us, counting_us = (statistics.median(each) for each in times)
    ratios = [counting / plain for plain, counting in zip(*times, strict=True)]
    return {
        "streams": num, "context": context, "plain_us": round(plain_us, 1), "counting_us": round(counting_us, 1),
        "ratio": round(statistics.median(ratios), 4), "ratios": [round(each, 4) for each in sorted(ratios)],
    }  # fmt: skip


def main() -> None:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--context", type=int, default=500, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--num-pages", type=int, default=24576, help="of each engine, which cannot both take all")
    parser.add_argument("--out", default="expert_load", help="name of the JSON file")
    parser.add_argument("--folder", type=Path, default=record.RESULTS, help="where it goes")
    args = parser.parse_args()
    longest = args.context + STEPS * (args.rounds + 1) + 128
    cores = [
        EngineCore(
            EngineConfig(
                model=args.model,
                load_format="dummy",
                max_num_seqs=max(args.streams),
                max_model_len=longest,
                num_pages=args.num_pages,
                selfcheck="first",
                enable_prefix_caching=False,
                expert_load=counts,
            )
        )
        for counts in (False, True)
    ]
    rows = []
    for num in args.streams:
        rows.append(measure(cores, num, args.context, args.rounds))
        print({key: value for key, value in rows[-1].items() if key != "ratios"})
    record.write(args.out, {**record.environment(), "model": args.model.name, "rows": rows}, args.folder)


if __name__ == "__main__":
    main()
