"""Tokens per second on a CPU: our engine against transformers' `generate`, same model, same token counts, one run.

    python -m benchmarks.bench_cpu [--threads 2] [--rounds 5] [--out NAME]

Ours is the engine as the service starts it: its own process with its default threads (all cores but one), requests and
tokens over its socket, scheduling, paging and sampling included.

Rivals: {fp32, bf16} x every experts implementation of transformers, batch = streams, greedy, no early stop. All
contenders take turns in every round, so that a noisy neighbour hits all of them; the median over rounds counts. The
record also has each contender's fastest round, the one that other users of a shared machine disturbed least.
The last line is JSON.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GptOssForCausalLM, Mxfp4Config
from transformers.utils import logging as hf_logging

from benchmarks import record
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.types import EngineRequest, SamplingParams

MODEL = Path(__file__).parents[1] / "assets" / "tiny-gpt-oss"
EXPERTS = ("eager", "batched_mm", "grouped_mm")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS = "moe-serve"
Contender = Callable[[int], None]


def prompts(num_streams: int, num_tokens: int) -> list[list[int]]:
    """Distinct prompts of ordinary token ids, the same for every contender."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(300, 3900, (num_streams, num_tokens), generator=generator).tolist()


def transformers_contender(dtype: torch.dtype, experts: str, num_prompt: int, num_new: int) -> Contender:
    """`generate` with a batch of equally long prompts."""
    model = GptOssForCausalLM.from_pretrained(MODEL, dtype=dtype, quantization_config=Mxfp4Config(dequantize=True))
    model = model.to(dtype).eval()
    model.set_experts_implementation(experts)

    def run(num_streams: int) -> None:
        ids = torch.tensor(prompts(num_streams, num_prompt))
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new, min_new_tokens=num_new
        )
        if out.shape[1] != num_prompt + num_new:
            raise RuntimeError(f"generate stopped early: {out.shape[1]} tokens")

    return run


class EngineContender:
    """Our engine process and its client."""

    def __init__(self, num_prompt: int, num_new: int) -> None:
        self._num_prompt = num_prompt
        self._sampling = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
        self._runner = asyncio.Runner()
        self._ids = itertools.count()
        self._client = self._runner.run(self._start())

    async def _start(self) -> EngineClient:
        client = EngineClient(EngineConfig(model=MODEL, enable_prefix_caching=False))
        await client.start()
        while not client.ready:
            if client.failure:
                raise RuntimeError(client.failure)
            await asyncio.sleep(0.05)
        return client

    async def _stream(self, prompt_ids: list[int]) -> None:
        request = EngineRequest(request_id=str(next(self._ids)), prompt_ids=prompt_ids, sampling=self._sampling)
        num_tokens = 0
        async for output in self._client.generate(request):
            num_tokens += len(output.token_ids)
        if num_tokens != self._sampling.max_tokens:
            raise RuntimeError(f"the engine produced {num_tokens} tokens, not {self._sampling.max_tokens}")

    async def _streams(self, num_streams: int) -> None:
        await asyncio.gather(*(self._stream(ids) for ids in prompts(num_streams, self._num_prompt)))

    def __call__(self, num_streams: int) -> None:
        """Continue `num_streams` prompts at once."""
        self._runner.run(self._streams(num_streams))

    def close(self) -> None:
        """Stop the engine process."""
        self._runner.run(self._client.close())
        self._runner.close()


def measure(contenders: dict[str, Contender], num_streams: int, num_new: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each contender in each round at `num_streams` streams, prompt processing included."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_index in range(rounds + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run(num_streams)
            if round_index:  # the first round warms up
                speeds[name].append(num_streams * num_new / (time.perf_counter() - start))
    return speeds


def to_best_rival(row: dict[str, float]) -> float:
    """Our speed as a multiple of the fastest rival's."""
    return round(row[OURS] / max(speed for name, speed in row.items() if name != OURS), 2)


def main() -> None:
    """Measure, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens of each stream")
    parser.add_argument("--new", type=int, default=128, help="generated tokens of each stream")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", default="cpu", help="name of the file in benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()

    ours = EngineContender(args.prompt, args.new)
    contenders: dict[str, Contender] = {OURS: ours}
    for dtype_name, dtype in DTYPES.items():
        for experts in EXPERTS:
            contenders[f"transformers {dtype_name} {experts}"] = transformers_contender(
                dtype, experts, args.prompt, args.new
            )
    speeds = {n: measure(contenders, n, args.new, args.rounds) for n in args.streams}
    ours.close()

    table = {n: {k: statistics.median(v) for k, v in row.items()} for n, row in speeds.items()}
    fastest = {n: {k: max(v) for k, v in row.items()} for n, row in speeds.items()}
    print(f"{'tokens/s':28}" + "".join(f"{n:>5} streams" for n in args.streams))
    for name in contenders:
        print(f"{name:28}" + "".join(f"{table[n][name]:13.0f}" for n in args.streams))
    ratios = {}
    for n in args.streams:
        ratios[f"{n} streams, to the best of transformers"] = to_best_rival(table[n])
        ratios[f"{n} streams, fastest rounds"] = to_best_rival(fastest[n])
    if {1, 8} <= set(args.streams):
        sequential = max(v for k, v in table[1].items() if k != OURS)
        ratios["8 streams, to sequential generate"] = round(table[8][OURS] / sequential, 2)
    result = {
        **record.environment(),
        "prompt_tokens": args.prompt,
        "new_tokens": args.new,
        "rounds": args.rounds,
        "tokens_per_second": {str(n): {k: round(v, 1) for k, v in row.items()} for n, row in table.items()},
        "fastest_rounds": {str(n): {k: round(v, 1) for k, v in row.items()} for n, row in fastest.items()},
        "ratios": ratios,
    }
    record.write(args.out, result)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
