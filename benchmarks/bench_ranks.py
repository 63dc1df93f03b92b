"""What more ranks add to a step apart from the model's collectives: sending the step, agreeing on it, following it.

    python -m benchmarks.bench_ranks [--ranks 2] [--sequences 64] [--tokens 400]

The model computes nothing, but its ranks meet in two collectives a step. `period_us` is the time between steps of
rank 0, `meeting_us` that of a collective to which all come at once, both medians. What more ranks add is their period
less that of one rank and two collectives. `cpu_us` is the CPU time of rank 0's thread a step, which other work on the
machine changes less. The last line is JSON.
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

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.rank_client import RankedEngineClient
from engine.step import StepBatch, StepRow
from engine.types import EngineRequest, SamplingParams

VOCAB_SIZE = 1000


async def run(tp, dp, num_sequences, num_tokens):
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
    """Median us from `pack` to the end of `unpack`."""
    rows = [StepRow(i, 1000 + i, 1, True, 1) for i in range(num_sequences)]
    numbers = np.arange(3 * num_sequences, dtype=np.int64).reshape(3, -1)
    step = StepBatch(rows, *numbers, np.zeros((16, 3), np.int32), True)
    times = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        StepBatch.unpack(step.pack())
        times.append(time.perf_counter() - start_s)
    return median_us(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args()
    result = {"ranks": args.ranks, "sequences": args.sequences, "pack_256_us": time_packing()}
    layouts = {"one rank": (1, 1), "tp": (args.ranks, 1), "dp": (1, args.ranks)}
    for name, (tp, dp) in layouts.items():
        result[name] = summarize(asyncio.run(run(tp, dp, args.sequences, args.tokens)))
        print(name, result[name], flush=True)
    for name in ("tp", "dp"):
        own = result[name]
        own["added_us"] = round(own["period_us"] - 2 * own["meeting_us"] - result["one rank"]["period_us"], 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
