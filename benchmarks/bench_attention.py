"""Attention over the paged KV cache on one GPU: each implementation against torch, in CUDA graphs where possible.

    python -m benchmarks.bench_attention [--backends triton,torch,flashinfer] [--out NAME] [--folder FOLDER] [--quick]

Shapes are GPT-OSS-20B's (64 query heads, 8 KV heads, head dim 64, with sinks, full layers and windows of 128) and
DeepSeek-V3's (128 query heads, one latent of 512 + 64, without sinks); both also with an FP8 cache. Each case is
compared with torch in fp32 before it is timed. "floor" is the larger of bytes over 4.3 TB/s and operations over 780
TFLOP/s, which an H200 reached in plain copies and products; "bandwidth" is the share of those 4.3 TB/s that the bytes
over the time are. The last line is JSON.
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
LATENT = AttentionSpec(num_heads=128, num_kv_heads=1, key_dim=576, value_dim=512, scale=192**-0.5, values_in_keys=True)
FP8 = torch.float8_e4m3fn
LAYERS = {
    "full": (FULL, torch.bfloat16),
    "window 128": (SLIDING, torch.bfloat16),
    "full, FP8": (FULL, FP8),
    "latent": (LATENT, torch.bfloat16),
    "latent, FP8": (LATENT, FP8),
}
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


def latent_cases(quick: bool) -> list[Case]:
    """The torch reference needs much memory for long prompts of 128 heads."""
    found = [decode_case(*size) for size in ((1, 1000), (1, 8000), (64, 1000), (64, 8000))]
    found.append(Case("prefill 2048 of 8192 x 1", (2048,), (8192,)))
    return [found[1], found[-1]] if quick else found


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

    def __init__(self, case: Case, spec: AttentionSpec, seed: int, kv_dtype: torch.dtype = torch.bfloat16) -> None:
        g = torch.Generator("cuda").manual_seed(seed)
        num_pages = sum(-(-length // PAGE_SIZE) for length in case.seq_lens) + 8
        self.batch = make_batch(case, g, num_pages)
        num_tokens = self.batch.num_tokens

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g, device="cuda").bfloat16()

        # Parts of one projection, as in a model; of latent attention, tensors of their own.
        num_shared = 0 if spec.values_in_keys else spec.num_kv_heads
        qkv = normal(num_tokens, spec.num_heads + spec.num_kv_heads + num_shared, spec.key_dim)
        self.q, self.k, v = qkv.split((spec.num_heads, spec.num_kv_heads, num_shared), dim=1)
        self.v = None if spec.values_in_keys else v[..., : spec.value_dim]
        self.sinks: torch.Tensor | None = torch.randn(spec.num_heads, generator=g, device="cuda")
        used = torch.zeros(num_pages * PAGE_SIZE, dtype=torch.bool, device="cuda")
        for row, length in zip(self.batch.page_table_BP.long(), case.seq_lens, strict=True):
            pos = torch.arange(length, device="cuda")
            used[row[pos // PAGE_SIZE] * PAGE_SIZE + pos % PAGE_SIZE] = True
        dims = (spec.kv_spec.key_dim, spec.kv_spec.value_dim)
        cache_bytes = used.numel() * spec.num_kv_heads * sum(dims) * kv_dtype.itemsize
        num_copies = NUM_COPIES if cache_bytes < 200e6 else 2
        self.caches = []
        for _ in range(num_copies):
            keys, values = (normal(used.numel(), spec.num_kv_heads, dim) for dim in dims)
            keys[~used] = values[~used] = float("nan")
            self.caches.append(LayerKv(keys.to(kv_dtype), values.to(kv_dtype)))


def bytes_and_flop(case: Case, spec: AttentionSpec, kv_dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of keys, values, queries and results, each read or written once; operations of both products."""
    num_bytes = flop = 0
    token_bytes = spec.num_kv_heads * (spec.kv_spec.key_dim + spec.kv_spec.value_dim) * kv_dtype.itemsize
    head_numbers = spec.num_heads * (spec.key_dim + spec.value_dim)
    for query_len, seq_len in zip(case.query_lens, case.seq_lens, strict=True):
        window = seq_len if spec.window is None else spec.window
        num_bytes += min(seq_len, query_len + window) * token_bytes + 2 * query_len * head_numbers
        flop += 2 * sum(min(pos + 1, window) for pos in range(seq_len - query_len, seq_len)) * head_numbers
    return num_bytes, flop


def reference(inputs: Inputs, spec: AttentionSpec) -> torch.Tensor:
    """torch in fp32; an FP8 cache stays one, so that new keys are rounded as they must be."""
    attention = make_attention("torch", [spec], torch.device("cuda"))
    cache = inputs.caches[0]
    copies = (x.clone() if x.dtype == FP8 else x.float() for x in (cache.keys, cache.values))
    plan = attention.plan(inputs.batch)
    v = None if inputs.v is None else inputs.v.float()
    return attention.run(spec, plan, LayerKv(*copies), inputs.q.float(), inputs.k.float(), v, inputs.sinks)


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


def measure_row(
    layer: str, case: Case, spec: AttentionSpec, kv_dtype: torch.dtype, seed: int, backends: list[str]
) -> dict[str, Any]:
    """One case with every backend; a backend that fails says why."""
    inputs = Inputs(case, spec, seed, kv_dtype)
    if spec.values_in_keys:
        inputs.sinks = None  # no model has them with latents, and FlashInfer's kernels take none
    want = reference(inputs, spec)
    num_bytes, flop = bytes_and_flop(case, spec, kv_dtype)
    floor_us = max(num_bytes / BYTES_PER_S, flop / FLOP_PER_S) * 1e6
    row: dict[str, Any] = {"layer": layer, "case": case.name, "floor_us": round(floor_us, 2)}
    for backend in backends:
        try:
            row[backend] = measure(case, spec, backend, inputs, want)
        except (RuntimeError, ValueError) as error:
            row[backend] = {"failed": str(error).splitlines()[0][:200]}
        if "us" in row[backend]:
            row[backend]["bandwidth"] = round(num_bytes / BYTES_PER_S * 1e6 / row[backend]["us"], 3)
    return row


def line_of(row: dict[str, Any], backends: list[str]) -> str:
    cells = [
        f"{b} {row[b].get('us', float('nan')):.1f} us, bandwidth {row[b].get('bandwidth', float('nan')):.2f} "
        f"{row[b].get('failed', '')}"
        for b in backends
    ]
    return f"{row['layer']:11} {row['case']:38} floor {row['floor_us']:8.1f}  " + "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="triton,torch")
    parser.add_argument("--out", default="attention")
    parser.add_argument("--folder", type=Path, default=record.RESULTS)
    parser.add_argument("--quick", action="store_true", help="two cases")
    args = parser.parse_args()
    backends = args.backends.split(",")
    rows = []
    for layer, (spec, kv_dtype) in LAYERS.items():
        for seed, case in enumerate((latent_cases if spec.values_in_keys else cases)(args.quick)):
            rows.append(measure_row(layer, case, spec, kv_dtype, seed, backends))
            print(line_of(rows[-1], backends), flush=True)
            torch.cuda.empty_cache()
    content = {**record.environment(), "rows": rows}
    record.write(args.out, content, args.folder)
    failed = sum("failed" in row[b] for row in rows for b in backends)
    print(json.dumps({"rows": len(rows), "failed": failed}))


if __name__ == "__main__":
    main()
