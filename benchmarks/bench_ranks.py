"""What more ranks add to a step apart from the model's collectives: sending the step, agreeing on it, following it.

    python -m benchmarks.bench_ranks [--ranks 2,4] [--sequences 64] [--tokens 400] [--rounds 3] [--seconds 20]
                                   [--out FOLDER]

The model computes nothing, but its ranks meet in two collectives a step. `period_us` is the time between steps of
rank 0, `meeting_us` that of a collective to which all come at once, both medians. What more ranks add is their period
less that of one rank and two collectives. `cpu_us` is the CPU time of rank 0's thread a step, which other work on the
machine changes less; `added_cpu_us` is what it has more of than one rank. Each number is the median of the rounds, in
which the layouts take turns; a run that has not come to its tokens after `--seconds` is cut. The last line is JSON.
"""

import argparse
import asyncio
import contextlib
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
from engine.rank_client import RankedEngineClient
from engine.step import StepBatch, StepRow
from engine.types import EngineRequest, SamplingParams

VOCAB_SIZE = 1000


async def run(tp, dp, num_sequences, num_tokens, most_seconds):
    """The notes of rank 0 in a run in which every scheduler decodes `num_sequences` at once."""
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

        async def ask(index):
            request = EngineRequest(request_id=str(index), prompt_ids=[index % VOCAB_SIZE] * 4, sampling=sampling)
            async for _ in client.generate(request):
                pass

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_seconds):
                await asyncio.gather(*(ask(index) for index in range(num_sequences * dp)))
        await asyncio.sleep(1.0)
        await client.close()
        return json.loads((Path(folder) / "0.json").read_text())


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
    layouts = {"one rank": (1, 1), "tp": (ranks, 1), "dp": (1, ranks)}
    found = {name: [] for name in layouts}
    for _ in range(rounds):
        for name, (tp, dp) in layouts.items():
            found[name].append(summarize(asyncio.run(run(tp, dp, sequences, tokens, seconds))))
            print(name, found[name][-1], flush=True)
        for name in ("tp", "dp"):
            own, one = found[name][-1], found["one rank"][-1]
            own["added_us"] = own["period_us"] - 2 * own["meeting_us"] - one["period_us"]
            own["added_cpu_us"] = own["cpu_us"] - one["cpu_us"]
    medians = {
        name: {key: round(statistics.median(each[key] for each in rows), 1) for key in rows[0]}
        for name, rows in found.items()
    }
    return {"ranks": ranks, "sequences": sequences, "rounds": rounds, "pack_256_us": time_packing()} | medians


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=lambda text: [int(each) for each in text.split(",")], default=[2])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="most of one run, its start apart")
    parser.add_argument("--out", type=Path, help="folder for ranks_cpu.json")
    args = parser.parse_args(argv)
    measured = [measure(ranks, args.sequences, args.tokens, args.rounds, args.seconds) for ranks in args.ranks]
    if args.out is not None:
        record.write("ranks_cpu", {**record.environment(), "runs": measured}, args.out)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
