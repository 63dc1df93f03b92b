"""What more ranks add to a step apart from the model's collectives: sending the step, agreeing on it, following it.

    python -m benchmarks.bench_ranks [--ranks 2,4] [--sequences 64,8] [--tokens 400] [--rounds 3] [--seconds 20]
                                   [--out FOLDER]

`--sequences` is how many decode at once, in total: a data-parallel rank has its share of them, so `dp` is compared with
`one rank, a share`. In `dp, all on each` every rank has that many, and the HTTP process, which needs a core too, takes
the tokens of as many more; that row is compared with `one rank`.

The model computes nothing, but its ranks meet twice a step, as in two collectives, over TCP and without a thread that
takes time of its own, as gloo has. `period_us` is the time between steps of rank 0, `meeting_us` that of a meeting to
which all come at once, both medians. What more ranks add is their period less that of one rank and two meetings.
`cpu_us` is the CPU time of rank 0's thread a step, which other work on the machine changes less; `added_cpu_us` is what
it has more of than one rank, its part of the meetings included. `agreement_us` is an agreement to which all come at
once, and is part of what is added. `client_us` is the CPU time a step of the process that takes the tokens, without
HTTP. Each number is the median of the rounds, in which the layouts take turns; a run that has not come to its tokens
after `--seconds` is cut. The last line is JSON.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import record
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.inlet import Inlet
from engine.rank_client import RankedEngineClient
from engine.step import StepBatch, StepRow
from engine.types import EngineRequest, SamplingParams

VOCAB_SIZE = 1000


async def run(tp, dp, num_sequences, num_tokens, most_seconds):
    """What is measured while every scheduler decodes `num_sequences` at once."""
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=Path(folder), device="cpu", tensor_parallel_size=tp, data_parallel_size=dp,
            expert_parallel_size=tp * dp, max_num_seqs=num_sequences, max_num_batched_tokens=4096, num_pages=8192,
            max_step_ms=0, overlap=False,
        )  # fmt: skip
        if tp * dp == 1:
            client = EngineClient(config, worker_module="benchmarks.one_rank_worker")
        else:
            client = RankedEngineClient(config, worker_module="benchmarks.ranks_worker")
        await client.start()
        while not client.ready:
            if client.failure:
                raise SystemExit(client.failure)
            await asyncio.sleep(0.02)
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)

        loop, cpu_s = asyncio.get_running_loop(), time.process_time()
        ends = [loop.create_future() for _ in range(num_sequences * dp)]
        for index, end in enumerate(ends):
            request = EngineRequest(request_id=str(index), prompt_ids=[index % VOCAB_SIZE] * 4, sampling=sampling)
            client.submit(request, Inlet(lambda output, end=end: output.finish_reason and end.set_result(None)))
        await asyncio.wait(ends, timeout=most_seconds)
        cpu_s = time.process_time() - cpu_s
        await asyncio.sleep(1.0)
        await client.close()
        notes = json.loads((Path(folder) / "0.json").read_text())
        return summarize(notes["steps"]) | {
            "agreement_us": notes["agreement_us"],
            "client_us": round(cpu_s / len(notes["steps"]) * 1e6, 1),
        }


def median_us(numbers):
    return round(statistics.median(numbers) * 1e6, 1)


def summarize(notes):
    """Medians over the middle of a run, in which all sequences decode."""
    starts_s, meetings_s, cpus_s = zip(*notes[len(notes) // 4 : 3 * len(notes) // 4], strict=True)
    return {
        "period_us": median_us(b - a for a, b in itertools.pairwise(starts_s)),
        "meeting_us": median_us(meetings_s),
        "cpu_us": median_us(b - a for a, b in itertools.pairwise(cpus_s)),
    }


def time_packing(num_sequences=256, repeats=300):
    """Median us of CPU time from `pack` to the end of `unpack`."""
    rows = [StepRow(i, 1000 + i, 1, True, 1) for i in range(num_sequences)]
    numbers = np.arange(3 * num_sequences, dtype=np.int64).reshape(3, -1)
    updates, no_updates = np.zeros((16, 3), np.int32), np.zeros((0, 3), np.int32)
    step = StepBatch(rows, *numbers, updates, True, np.zeros(0, np.int64), no_updates)
    times = []
    for _ in range(repeats):
        start_s = time.thread_time()
        StepBatch.unpack(step.pack())
        times.append(time.thread_time() - start_s)
    return median_us(times)


def measure(ranks, sequences, tokens, rounds, seconds):
    """The result of all rounds."""
    share = sequences // ranks
    layouts = {  # ranks of a group, groups, sequences of a group, and what it is compared with
        "one rank": (1, 1, sequences, None),
        "one rank, a share": (1, 1, share, None),
        "tp": (ranks, 1, sequences, "one rank"),
        "dp": (1, ranks, share, "one rank, a share"),
        "dp, all on each": (1, ranks, sequences, "one rank"),
    }
    found = {name: [] for name in layouts}
    for _ in range(rounds):
        for name, (tp, dp, each, base) in layouts.items():
            row = asyncio.run(run(tp, dp, each, tokens, seconds))
            if base is not None:
                one = found[base][-1]
                row["added_us"] = row["period_us"] - 2 * row["meeting_us"] - one["period_us"]
                row["added_cpu_us"] = row["cpu_us"] - one["cpu_us"]
            found[name].append(row)
            print(name, row, flush=True)
    medians = {
        name: {key: round(statistics.median(each[key] for each in rows), 1) for key in rows[0]}
        for name, rows in found.items()
    }
    return {"ranks": ranks, "sequences": sequences, "rounds": rounds, "pack_256_us": time_packing()} | medians


def integers(text):
    """Those of `2,4`."""
    return [int(each) for each in text.split(",")]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=integers, default=[2])
    parser.add_argument("--sequences", type=integers, default=[64])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="most of one run, its start apart")
    parser.add_argument("--out", type=Path, help="folder for ranks_cpu.json")
    args = parser.parse_args(argv)
    measured = [
        measure(ranks, sequences, args.tokens, args.rounds, args.seconds)
        for ranks, sequences in itertools.product(args.ranks, args.sequences)
    ]
    if args.out is not None:
        record.write("ranks_cpu", {**record.environment(), "runs": measured}, args.out)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
