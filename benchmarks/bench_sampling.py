"""Choosing the tokens of a step on one GPU: the sampling kernels against the torch path.

    python -m benchmarks.bench_sampling [--vocab 201088] [--rows 1,8,64,256] [--out NAME] [--folder FOLDER] [--quick]

The logits are normal with a spread of 3, so that some hundred tokens have most of the probability, as those of a
language model; "flat" rows have a spread of 1, for which top-p reaches beyond the candidates. "device" is the median
time between CUDA events around the launches of a step. "step" is the median time from the call until the host has the
tokens, with nothing else to do; the torch path waits within it. "floor" is the time to read the logits once at 4.3
TB/s, which an H200 reached in plain copies. Tokens of both paths are compared first. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from engine.gpu_sampler import GpuSampler
from engine.sampler import PendingTokens, Sampler, TorchSampler
from engine.sequence import Sequence
from engine.types import EngineRequest, SamplingParams

BYTES_PER_S = 4.3e12
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 40": {"top_k": 40},
    "top_k 40, penalties": {"top_k": 40, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "greedy, logprobs 5": {"temperature": 0.0, "logprobs": 5},
    "flat, top_p 0.95": {"top_p": 0.95},
}
SPREADS = {"flat, top_p 0.95": 1.0}


def make_seqs(kind: dict[str, Any], num_rows: int) -> list[Sequence]:
    """Requests in the middle of their answers."""
    seqs = []
    for row in range(num_rows):
        sampling = SamplingParams(max_tokens=10**6, **kind)
        request = EngineRequest(request_id=f"r{row}", prompt_ids=list(range(500)), sampling=sampling)
        seqs.append(Sequence(request, stop_ids=frozenset(), seed=row))
        seqs[-1].token_ids += range(100, 300)
    return seqs


def median_us(action: Callable[[], float], num_runs: int) -> float:
    return statistics.median(action() for _ in range(num_runs))


class Case:
    """One kind of request at one batch size. Each run has fresh logits, as a forward pass would leave them."""

    def __init__(self, kind: str, num_rows: int, vocab_size: int) -> None:
        self.seqs = make_seqs(KINDS[kind], num_rows)
        self.rows = list(range(num_rows))
        g = torch.Generator("cuda").manual_seed(num_rows)
        spread = SPREADS.get(kind, 3.0)
        self.logits = torch.randn(num_rows, vocab_size, device="cuda", generator=g) * spread
        self.work = torch.empty_like(self.logits)

    def launch(self, sampler: Sampler) -> PendingTokens:
        return sampler.launch(self.work, self.seqs, self.rows, self.rows)

    def tokens(self, sampler: Sampler) -> list[int | None]:
        """The choices, with requests that no other sampler has seen."""
        for seq in self.seqs:
            seq.sampler_state = None
        self.work.copy_(self.logits)
        pending = self.launch(sampler)
        torch.cuda.synchronize()
        return pending.read().tokens

    def device_us(self, sampler: Sampler) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        self.work.copy_(self.logits)
        torch.cuda._sleep(3_000_000)  # about 2 ms, in which the host launches everything that does not wait
        start.record()
        self.launch(sampler)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000

    def step_us(self, sampler: Sampler) -> float:
        self.work.copy_(self.logits)
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        self.launch(sampler)
        torch.cuda.synchronize()
        return (time.perf_counter() - start_s) * 1e6


def measure(kind: str, num_rows: int, vocab_size: int, num_runs: int) -> dict[str, Any]:
    """Times in microseconds, and the share of rows in which the two paths agree."""
    case = Case(kind, num_rows, vocab_size)
    result: dict[str, Any] = {"kind": kind, "rows": num_rows, "floor_us": num_rows * vocab_size * 4 / BYTES_PER_S * 1e6}
    chosen = {}
    for name, kernels in (("kernels", True), ("torch", False)):
        tokens_M = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
        sampler: Sampler = GpuSampler(tokens_M, vocab_size) if kernels else TorchSampler(tokens_M)
        chosen[name] = case.tokens(sampler)
        runs = num_runs if kernels else max(num_runs // 4, 3)
        for _ in range(3):
            case.step_us(sampler)
        result[f"{name}_device_us"] = median_us(lambda sampler=sampler: case.device_us(sampler), runs)
        result[f"{name}_step_us"] = median_us(lambda sampler=sampler: case.step_us(sampler), runs)
        del sampler
        for seq in case.seqs:
            seq.sampler_state = None
        torch.cuda.empty_cache()
    pairs = list(zip(chosen["kernels"], chosen["torch"], strict=True))
    result["same_tokens"] = sum(mine == theirs for mine, theirs in pairs) / len(pairs)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=201_088)
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--out", help="name of the JSON file to write")
    parser.add_argument("--folder", type=Path, default=record.RESULTS)
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    args = parser.parse_args()
    cases = []
    with torch.inference_mode():
        for kind in KINDS:
            for num_rows in map(int, args.rows.split(",")):
                case = measure(kind, num_rows, args.vocab, 5 if args.quick else 41)
                print({name: round(x, 2) if isinstance(x, float) else x for name, x in case.items()}, flush=True)
                cases.append(case)
    content = {**record.environment(), "vocab_size": args.vocab, "cases": cases}
    if args.out:
        record.write(args.out, content, args.folder)
    print(json.dumps(content))


if __name__ == "__main__":
    main()
