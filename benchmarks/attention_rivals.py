"""FlashInfer's attention against ours over the same paged cache on one Hopper GPU, in CUDA graphs.

    python -m benchmarks.attention_rivals [--out NAME] [--folder FOLDER] [--seconds 95] [--quick]

Layers are GPT-OSS's (64 query heads, 8 KV heads, head dim 64, with sinks; full, and a window of 128) and DeepSeek-V3's
latents (128 query heads, without sinks). FlashInfer runs its kernels with sinks, which also serve its decodes, and its
MLA kernels, each as fa2 and as fa3. Both sides are compared with fp32 torch before they are timed.

Our time includes storing the new keys and values. FlashInfer's is given twice: attention alone, which it cannot be
faster than in a service, and with its own store. Every line is printed as soon as it is measured; cases that do not fit
into `--seconds` are left out and counted. The last line is JSON.
"""

import argparse
import importlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.bench_attention import FULL, LATENT, PAGE_SIZE, SLIDING, Case, Inputs, decode_case, graph_us
from model.attention.base import AttentionSpec, make_attention
from model.batch import LayerKv

LAYERS = {"full": FULL, "window 128": SLIDING, "latent": LATENT}
CONTEXTS, STREAMS = (1000, 8000, 32000), (1, 8, 64, 256)
KERNELS = ("fa2", "fa3")
CHECKED_QUERIES = 32  # of the first and the last request
TOLERANCE = 0.01  # relative, bf16 products and results
WORTH_IT = 0.97  # of our time: a rival below that would be shipped
_WORKSPACE_BYTES = 512 << 20
_Run = Callable[[LayerKv], torch.Tensor]


def cases(layer: str, quick: bool) -> list[Case]:
    """Decodes from few keys to many, then a long prompt."""
    if layer == "latent":
        found = [decode_case(streams, 1000) for streams in STREAMS] + [decode_case(64, 8000)]
        found.append(Case("prefill 2048 of 8192", (2048,), (8192,)))
    else:
        found = [decode_case(streams, context) for context, streams in itertools.product(CONTEXTS, STREAMS)]
        found.insert(0, Case("prefill 8192 of 8192", (8192,), (8192,)))
    return [found[0], found[-1]] if quick else found


def reference(
    case: Case, spec: AttentionSpec, inputs: Inputs, cache: LayerKv, sinks_H: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows of the output and their values in fp32, of the last queries of the first and the last request."""
    batch = inputs.batch
    ends = list(itertools.accumulate(case.query_lens))
    for row in sorted({0, len(ends) - 1}):
        length, num_queries = case.seq_lens[row], min(case.query_lens[row], CHECKED_QUERIES)
        queries = slice(ends[row] - num_queries, ends[row])
        pos_S = torch.arange(length, device=inputs.q.device)
        slots_S = batch.page_table_BP[row].long()[pos_S // PAGE_SIZE] * PAGE_SIZE + pos_S % PAGE_SIZE
        keys_SGD = cache.keys[slots_S].float()
        values_SGV = keys_SGD[..., : spec.value_dim] if spec.values_in_keys else cache.values[slots_S].float()
        num_shared = spec.num_heads // spec.num_kv_heads
        q_QGRD = inputs.q[queries].float().unflatten(1, (spec.num_kv_heads, num_shared))
        logits_GRQS = torch.einsum("qgrd,sgd->grqs", q_QGRD, keys_SGD) * spec.scale
        query_pos_Q1 = pos_S[length - num_queries :, None]
        is_seen_QS = (pos_S <= query_pos_Q1) & (pos_S > query_pos_Q1 - (spec.window or length))
        logits_GRQS = logits_GRQS.masked_fill(~is_seen_QS, -torch.inf)
        if sinks_H is not None:
            sinks_GRQ1 = sinks_H.view(spec.num_kv_heads, num_shared, 1, 1).expand(-1, -1, num_queries, 1)
            logits_GRQS = torch.cat((logits_GRQS, sinks_GRQ1), dim=-1)
        weights_GRQS = logits_GRQS.softmax(dim=-1)[..., :length]
        yield queries, torch.einsum("grqs,sgv->qgrv", weights_GRQS, values_SGV).flatten(1, 2)


def worst_error(got_THV: torch.Tensor, want: Iterable[tuple[slice, torch.Tensor]]) -> float:
    """Largest relative error of any of the requests in `want`; infinite for NaN."""
    errors = [((got_THV[rows].float() - values).norm() / values.norm()).item() for rows, values in want]
    return max(math.inf if math.isnan(error) else error for error in errors)


class Rival:
    """FlashInfer's kernels for one case: `attend` over a cache, and `store` of the new keys and values."""

    def __init__(self, case: Case, spec: AttentionSpec, inputs: Inputs, kernel: str) -> None:
        """Plan; `kernel` is fa2 or fa3."""
        self._spec, self._inputs, self._batch = spec, inputs, inputs.batch
        lens_B = self._batch.seq_lens_B
        counts = [-(-length // PAGE_SIZE) for length in case.seq_lens]
        rows = self._batch.page_table_BP
        self._indices = torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)]).contiguous()
        self._indptr_B1 = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=lens_B.device)
        self._last_B = (lens_B - 1) % PAGE_SIZE + 1
        self._queries_B1 = self._batch.query_start_B1
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=lens_B.device)
        self._q_THD = inputs.q.contiguous()
        plan = self._plan_latents if spec.values_in_keys else self._plan_heads
        self._wrapper = plan(workspace, kernel)

    def _plan_heads(self, workspace: torch.Tensor, kernel: str) -> Any:
        spec, module = self._spec, importlib.import_module("flashinfer.attention")
        window_left = -1 if spec.window is None else spec.window - 1
        wrapper = module.BatchAttentionWithAttentionSinkWrapper(
            workspace, "NHD", use_cuda_graph=True, qo_indptr_buf=self._queries_B1.clone(),
            paged_kv_indptr_buf=self._indptr_B1.clone(), paged_kv_indices_buf=self._indices.clone(),
            paged_kv_last_page_len_buf=self._last_B.clone(), backend=kernel, head_dim_qk=spec.key_dim,
            head_dim_vo=spec.value_dim, window_left=window_left,
        )  # fmt: skip
        wrapper.plan(
            self._queries_B1, self._indptr_B1, self._indices, self._last_B, spec.num_heads, spec.num_kv_heads,
            spec.key_dim, PAGE_SIZE, causal=True, window_left=window_left, q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )  # fmt: skip
        return wrapper

    def _plan_latents(self, workspace: torch.Tensor, kernel: str) -> Any:
        spec, module = self._spec, importlib.import_module("flashinfer.mla")
        lens_B = self._batch.seq_lens_B
        wrapper = module.BatchMLAPagedAttentionWrapper(
            workspace, use_cuda_graph=True, qo_indptr=self._queries_B1.clone(), kv_indptr=self._indptr_B1.clone(),
            kv_indices=self._indices.clone(), kv_len_arr=lens_B.clone(), backend=kernel,
        )  # fmt: skip
        wrapper.plan(
            qo_indptr=self._queries_B1, kv_indptr=self._indptr_B1, kv_indices=self._indices, kv_len_arr=lens_B,
            num_heads=spec.num_heads, head_dim_ckv=spec.value_dim, head_dim_kpe=spec.key_dim - spec.value_dim,
            page_size=PAGE_SIZE, causal=True, sm_scale=spec.scale, q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )  # fmt: skip
        return wrapper

    def cache(self, kv: LayerKv) -> LayerKv:
        """The cache in FlashInfer's layout: of latents a copy with latent and rope apart, else the same memory."""
        latent = self._spec.value_dim
        if self._spec.values_in_keys:
            return LayerKv(kv.keys[:, 0, :latent].contiguous(), kv.keys[:, 0, latent:].contiguous())
        return kv

    def attend(self, kv: LayerKv) -> torch.Tensor:
        """Attention over what is stored."""
        keys, values = (x.unflatten(0, (-1, PAGE_SIZE)) for x in (kv.keys, kv.values))
        if self._spec.values_in_keys:
            q_nope, q_pe = self._q_THD.split((keys.shape[-1], values.shape[-1]), dim=-1)
            out: torch.Tensor = self._wrapper.run(q_nope=q_nope, q_pe=q_pe, ckv_cache=keys, kpe_cache=values)
            return out
        out = self._wrapper.run(self._q_THD, (keys, values), self._inputs.sinks, self._spec.scale)
        return out

    def store(self) -> Callable[[LayerKv], None] | None:
        """What stores the new keys and values by `append_paged_kv_cache`; None for latents."""
        inputs = self._inputs
        if inputs.v is None:
            return None
        page: Any = importlib.import_module("flashinfer.page")
        rows_T, positions_T = page.get_batch_indices_positions(
            self._queries_B1, self._batch.seq_lens_B, self._batch.num_tokens
        )
        new = (inputs.k, inputs.v)

        def append(kv: LayerKv) -> None:
            paged = tuple(x.unflatten(0, (-1, PAGE_SIZE)) for x in (kv.keys, kv.values))
            page.append_paged_kv_cache(*new, rows_T, positions_T, paged, self._indices, self._indptr_B1, self._last_B)

        return append


def timed(run: _Run, caches: list[LayerKv]) -> float:
    """Microseconds of one call, in a graph that takes the caches in turn."""
    for cache in caches:
        run(cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for cache in caches:
            run(cache)
    return graph_us(graph) / len(caches)


def measure(case: Case, spec: AttentionSpec, seed: int) -> dict[str, Any]:
    """Our time and FlashInfer's by kernel, or why it has none."""
    inputs = Inputs(case, spec, seed)
    sinks_H = None if spec.values_in_keys else inputs.sinks
    attention = make_attention("triton", [spec], torch.device("cuda"))
    plan = attention.plan(inputs.batch)

    def ours(cache: LayerKv) -> torch.Tensor:
        return attention.run(spec, plan, cache, inputs.q, inputs.k, inputs.v, sinks_H)

    got_THV = ours(inputs.caches[0])
    want = list(reference(case, spec, inputs, inputs.caches[0], sinks_H))
    row: dict[str, Any] = {"error": worst_error(got_THV, want), "us": timed(ours, inputs.caches), "flashinfer": {}}
    for kernel in KERNELS:
        try:
            row["flashinfer"][kernel] = _measure_rival(Rival(case, spec, inputs, kernel), inputs, want)
        except (RuntimeError, ValueError, TypeError, ImportError) as error:
            row["flashinfer"][kernel] = {"failed": " ".join(str(error).split())[:200]}
    return row


def _measure_rival(rival: Rival, inputs: Inputs, want: list[tuple[slice, torch.Tensor]]) -> dict[str, Any]:
    """`us`: attention alone; `with_store_us`: after storing the new keys and values."""
    caches = [rival.cache(cache) for cache in inputs.caches]
    error = worst_error(rival.attend(caches[0]), want)
    if not error < TOLERANCE:
        return {"error": error, "failed": f"relative error {error:.3g}"}
    found: dict[str, Any] = {"error": error, "us": timed(rival.attend, caches)}
    append = rival.store()
    if append is not None:

        def store_and_attend(cache: LayerKv) -> torch.Tensor:
            append(cache)
            return rival.attend(cache)

        found["with_store_us"] = timed(store_and_attend, caches)
    return found


def ratio(row: dict[str, Any], key: str) -> float | None:
    """FlashInfer's best time over ours; None if it has none."""
    times = [kernel[key] for kernel in row["flashinfer"].values() if key in kernel]
    return min(times) / row["us"] if times else None


def line_of(row: dict[str, Any]) -> str:
    """One row as text."""
    cells = [f"ours {row['us']:9.1f} us"]
    for name, kernel in row["flashinfer"].items():
        stored = f" ({kernel['with_store_us']:.1f} with store)" if "with_store_us" in kernel else ""
        cells.append(f"{name} {kernel['us']:9.1f} us{stored}" if "us" in kernel else f"{name}: {kernel['failed']}")
    return f"{row['layer']:11}{row['case']:22}" + "   ".join(cells)


def summary(rows: list[dict[str, Any]], num_left_out: int) -> dict[str, Any]:
    """Where FlashInfer takes less than `WORTH_IT` of our time, alone and with its store."""
    faster = {
        key: {
            f"{row['layer']}, {row['case']}": round(share, 3)
            for row in rows
            if (share := ratio(row, key)) is not None and share < WORTH_IT
        }
        for key in ("us", "with_store_us")
    }
    return {
        "measured": len(rows),
        "left_out": num_left_out,
        "failed": sum("failed" in kernel for row in rows for kernel in row["flashinfer"].values()),
        "flashinfer_faster_alone": faster["us"],
        "flashinfer_faster_with_store": faster["with_store_us"],
    }


def main() -> None:
    """Measure until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="attention_rivals")
    parser.add_argument("--folder", type=Path, default=record.RESULTS)
    parser.add_argument("--seconds", type=float, default=95, help="no case begins after so many")
    parser.add_argument("--quick", action="store_true", help="two cases of each layer")
    args = parser.parse_args()
    wanted = [(layer, case) for layer in LAYERS for case in cases(layer, args.quick)]
    # Short contexts of all layers first: where time runs out, only the longest are left out.
    wanted.sort(key=lambda item: sum(item[1].seq_lens))
    end_s, rows = time.monotonic() + args.seconds, []
    for seed, (layer, case) in enumerate(wanted):
        if time.monotonic() > end_s:
            break
        rows.append({"layer": layer, "case": case.name, **measure(case, LAYERS[layer], seed)})
        print(line_of(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    found = summary(rows, len(wanted) - len(rows))
    record.write(args.out, {**record.environment(), "summary": found, "rows": rows}, args.folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
