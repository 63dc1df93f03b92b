"""Attention over the paged KV cache on one GPU: each implementation against torch, in CUDA graphs where possible.

    python -m benchmarks.bench_attention [--backends triton,torch] [--out NAME] [--folder FOLDER] [--quick]

Shapes are GPT-OSS-20B's: 64 query heads, 8 KV heads, head dim 64, sinks, full layers and windows of 128. Each case is
compared with torch in fp32 before it is timed. "floor" is the larger of bytes over 4.3 TB/s and operations over
780 TFLOP/s, which an H200 reached in plain copies and products. The last line is JSON.
"""

import argparse
import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from model.attention.base import AttentionSpec, make_attention
from model.batch import ForwardBatch, LayerKv

FULL = AttentionSpec(num_heads=64, num_kv_heads=8, key_dim=64, value_dim=64, scale=0.125)
SLIDING = replace(FULL, window=128)
PAGE_SIZE = 16
BYTES_PER_S, FLOP_PER_S = 4.3e12, 780e12
NUM_COPIES = 8  # take turns, so that small caches are not read from the L2
TOLERANCE = 0.01  # relative, bf16 products and results


@dataclass(frozen=True)
class Case:
    """Requests of one step: new tokens and keys of each."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]


def decode_case(num_requests: int, num_keys: int) -> Case:
    return Case(f"decode {num_requests} x {num_keys}", (1,) * num_requests, (num_keys,) * num_requests)


def cases(quick: bool) -> list[Case]:
    decodes = [(1, 1000), (1, 32000), (8, 1000), (64, 1000), (256, 512), (64, 8000)]
    prompts = [((1000,), (1000,)), ((2048,), (8192,)), ((8192,), (8192,)), ((512,) * 8, (512,) * 8)]
    mixed = Case("63 decodes of 1000 + prompt of 2048", (1,) * 63 + (2048,), (1000,) * 63 + (2048,))
    found = [decode_case(*size) for size in decodes]
    found += [Case(f"prefill {q[0]} of {s[0]} x {len(q)}", q, s) for q, s in prompts]
    return found[:1] + found[6:7] if quick else [*found, mixed]


def make_batch(case: Case, generator: torch.Generator, num_pages: int) -> ForwardBatch:
    """Shuffled pages."""
    device = generator.device
    counts = [-(-length // PAGE_SIZE) for length in case.seq_lens]
    order = torch.randperm(num_pages, generator=generator, device=device).int()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    first = 0
    for index, count in enumerate(counts):
        table[index, :count] = order[first : first + count]
        first += count
    positions, slots = [], []
    for index, (query_len, seq_len) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        pos = torch.arange(seq_len - query_len, seq_len, device=device)
        positions.append(pos)
        slots.append(table[index].long()[pos // PAGE_SIZE] * PAGE_SIZE + pos % PAGE_SIZE)
    ends = torch.tensor(case.query_lens, device=device).cumsum(0)
    return ForwardBatch(
        input_ids_T=torch.zeros(int(ends[-1]), dtype=torch.long, device=device),
        positions_T=torch.cat(positions), slots_T=torch.cat(slots),
        query_start_B1=torch.cat((ends.new_zeros(1), ends)).int(),
        seq_lens_B=torch.tensor(case.seq_lens, dtype=torch.int32, device=device), page_table_BP=table,
        logit_rows_R=ends - 1, query_lens=case.query_lens, seq_lens=case.seq_lens, page_size=PAGE_SIZE,
    )  # fmt: skip


class Inputs:
    """Tensors of one case, with as many caches as the rotation needs; unused slots hold NaN."""

    def __init__(self, case: Case, spec: AttentionSpec, seed: int) -> None:
        g = torch.Generator("cuda").manual_seed(seed)
        num_pages = sum(-(-length // PAGE_SIZE) for length in case.seq_lens) + 8
        self.batch = make_batch(case, g, num_pages)
        num_tokens = self.batch.num_tokens

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g, device="cuda").bfloat16()

        qkv = normal(num_tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.key_dim)
        self.q, self.k, self.v = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        self.v = self.v[..., : spec.value_dim]
        self.sinks = torch.randn(spec.num_heads, generator=g, device="cuda")
        used = torch.zeros(num_pages * PAGE_SIZE, dtype=torch.bool, device="cuda")
        for row, length in zip(self.batch.page_table_BP.long(), case.seq_lens, strict=True):
            pos = torch.arange(length, device="cuda")
            used[row[pos // PAGE_SIZE] * PAGE_SIZE + pos % PAGE_SIZE] = True
        cache_bytes = 2 * used.numel() * spec.num_kv_heads * spec.key_dim * 2
        num_copies = NUM_COPIES if cache_bytes < 200e6 else 2
        self.caches = []
        for _ in range(num_copies):
            keys, values = (normal(used.numel(), spec.num_kv_heads, dim) for dim in (spec.key_dim, spec.value_dim))
            keys[~used] = values[~used] = float("nan")
            self.caches.append(LayerKv(keys, values))


def floor_us(case: Case, spec: AttentionSpec) -> float:
    """The larger of the memory and the arithmetic floor, in microseconds."""
    num_bytes = flop = 0
    for query_len, seq_len in zip(case.query_lens, case.seq_lens, strict=True):
        window = seq_len if spec.window is None else spec.window
        keys = min(seq_len, query_len + window)
        num_bytes += 2 * 2 * keys * spec.num_kv_heads * spec.key_dim + 4 * query_len * spec.num_heads * spec.key_dim
        visible = sum(min(pos + 1, window) for pos in range(seq_len - query_len, seq_len))
        flop += 4 * visible * spec.num_heads * spec.key_dim
    return max(num_bytes / BYTES_PER_S, flop / FLOP_PER_S) * 1e6


def reference(inputs: Inputs, spec: AttentionSpec) -> torch.Tensor:
    """torch in fp32."""
    attention = make_attention("torch", [spec], torch.device("cuda"))
    cache = inputs.caches[0]
    kv = LayerKv(cache.keys.float(), cache.values.float())
    plan = attention.plan(inputs.batch)
    return attention.run(spec, plan, kv, inputs.q.float(), inputs.k.float(), inputs.v.float(), inputs.sinks)


def measure(case: Case, spec: AttentionSpec, backend: str, inputs: Inputs, want: torch.Tensor) -> dict[str, Any]:
    """Error against the reference, and microseconds per layer without the plan."""
    attention = make_attention(backend, [spec], torch.device("cuda"))
    plan = attention.plan(inputs.batch)

    def run(cache: LayerKv) -> torch.Tensor:
        return attention.run(spec, plan, cache, inputs.q, inputs.k, inputs.v, inputs.sinks)

    got = run(inputs.caches[0])
    error = ((got.float() - want).norm() / want.norm()).item()
    if not error < TOLERANCE:
        return {"error": error, "failed": f"relative error {error:.3g}"}
    for cache in inputs.caches:
        run(cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for cache in inputs.caches:
            out = run(cache)
    graph.replay()
    again = run(inputs.caches[-1])
    if not torch.equal(out, again):
        return {"error": error, "failed": "a replayed graph gives another result than an eager call"}
    return {"error": error, "us": graph_us(graph) / len(inputs.caches)}


def graph_us(graph: torch.cuda.CUDAGraph) -> float:
    times = []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="triton,torch")
    parser.add_argument("--out", default="attention")
    parser.add_argument("--folder", type=Path, default=record.RESULTS)
    parser.add_argument("--quick", action="store_true", help="two cases")
    args = parser.parse_args()
    rows = []
    for kind, spec in (("full", FULL), ("window 128", SLIDING)):
        for seed, case in enumerate(cases(args.quick)):
            inputs = Inputs(case, spec, seed)
            want = reference(inputs, spec)
            row: dict[str, Any] = {"layer": kind, "case": case.name, "floor_us": round(floor_us(case, spec), 2)}
            for backend in args.backends.split(","):
                try:
                    row[backend] = measure(case, spec, backend, inputs, want)
                except (RuntimeError, ValueError) as error:
                    row[backend] = {"failed": str(error).splitlines()[0][:200]}
            rows.append(row)
            cells = [
                f"{b} {row[b].get('us', float('nan')):.1f} ({row[b].get('failed', '')})"
                for b in args.backends.split(",")
            ]
            print(f"{kind:11} {case.name:38} floor {row['floor_us']:8.1f}  " + "  ".join(cells), flush=True)
            del inputs, want
            torch.cuda.empty_cache()
    content = {**record.environment(), "rows": rows}
    record.write(args.out, content, args.folder)
    failed = sum("failed" in row[b] for row in rows for b in args.backends.split(","))
    print(json.dumps({"rows": len(rows), "failed": failed}))


if __name__ == "__main__":
    main()
