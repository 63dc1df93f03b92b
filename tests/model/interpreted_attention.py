"""Runs the Triton attention kernels in Triton's interpreter, on the CPU; prints each case's largest error as JSON.

Started as a program of its own, since Triton decides when it is imported whether it compiles or interprets.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from model.attention import tiles
from model.attention import triton as triton_attention
from model.attention.base import AttentionSpec, make_attention
from model.batch import LayerKv
from tests.model.attention_cases import GQA, MLA, SLIDING, Requests, Sequence, Step, worst_error
from tests.model.paged import PagedCache

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
MIXED = [
    {"a": 5, "b": 70},
    {"b": 1, "a": 1},
    {"c": 17, "a": 1, "b": 40, "d": 1},
    {"a": 1, "b": 1, "c": 1, "d": 1},
    {"d": 30, "b": 1, "c": 1},
]
FEW = [{"a": 2, "b": 19}, {"b": 1, "a": 1}]
WINDOW_EDGES = [{"a": 126}, {"a": 1}, {"a": 1}, {"a": 1}, {"a": 2}]
MANY_HEADS = replace(MLA, num_heads=20, key_dim=48, value_dim=32)  # more than one tile of heads
ODD_LATENT = replace(MLA, num_heads=3, key_dim=26, value_dim=20, window=9)
ODD_HEADS = AttentionSpec(num_heads=6, num_kv_heads=2, key_dim=24, value_dim=20, scale=0.2, window=9)


def error_of(
    spec: AttentionSpec,
    steps: list[dict[str, int]],
    sinks: torch.Tensor | None,
    *,
    processors: int = 1,
    page_size: int = 16,
    is_rotated: bool = False,
    kv_dtype: torch.dtype = torch.float32,
) -> float:
    lengths = {name: sum(step.get(name, 0) for step in steps) for name in "abcd"}
    sequences = {
        n: Sequence(spec, length, seed, sinks, kv_dtype) for seed, (n, length) in enumerate(lengths.items()) if length
    }
    attention = make_attention("triton", [spec], torch.device("cpu"))
    attention._num_processors = processors  # type: ignore[attr-defined]
    return worst_error(attention, Requests(spec, sequences, sinks, page_size, is_rotated, kv_dtype), steps)


class FarAway(Requests):
    """Pages so far into a bf16 cache that 32 bits do not count its numbers. Only the pages in use take memory."""

    first_page = 2**23

    def __init__(self, spec: AttentionSpec, sequences: dict[str, Sequence]) -> None:
        super().__init__(spec, sequences, None)
        num_slots = (self.first_page + self.cache.num_pages) * self.cache.page_size
        shape = (num_slots, spec.num_kv_heads, spec.key_dim)
        assert num_slots * spec.num_kv_heads * spec.key_dim > 2**31
        self.cache.layers = [LayerKv(*(torch.empty(shape, dtype=torch.bfloat16) for _ in "kv"))]

    def step(self, counts: dict[str, int]) -> Step:
        """Queries further apart than they are long, as parts of one projection are; heads further apart than tokens."""
        step = super().step(counts)
        moved = replace(
            step.batch,
            slots_T=step.batch.slots_T + self.first_page * self.cache.page_size,
            page_table_BP=step.batch.page_table_BP + self.first_page,
        )
        assert step.v is not None
        q = torch.cat((step.q, step.q + 1), dim=1)[:, : step.q.shape[1]]
        k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (step.k, step.v))
        return replace(step, batch=moved, q=q, k=k, v=v)


def error_far_away() -> float:
    spec = replace(GQA, value_dim=GQA.key_dim)
    sequences = {name: Sequence(spec, 24, seed, None, torch.bfloat16) for seed, name in enumerate("ab")}
    attention = make_attention("triton", [spec], torch.device("cpu"))
    return worst_error(attention, FarAway(spec, sequences), [{"a": 20, "b": 23}, {"a": 1, "b": 1}, {"a": 3}])


def fp8_bytes_unlike_torch() -> float:
    """Share of the written FP8 numbers that torch rounds elsewhere: ties, subnormals, out of range, infinite, NaN."""
    g = torch.Generator().manual_seed(0)
    spec, num_tokens = replace(GQA, value_dim=GQA.key_dim), 64
    k, v = (torch.randn(num_tokens, 2, 8, generator=g) * 4.0 ** torch.randint(-6, 6, (2, 8)) for _ in "kv")
    k[0, 0] = torch.tensor([1.0625, 1.1875, 2**-10, -(3 * 2**-10), 464.0, 1e9, -float("inf"), float("nan")])
    written = []
    for name in ("triton", "torch"):
        cache = PagedCache([spec.kv_spec], dtype=torch.float8_e4m3fn)
        batch = cache.batch({"a": [0] * num_tokens})
        attention = make_attention(name, [spec], torch.device("cpu"))
        attention.run(spec, attention.plan(batch), cache.layers[0], torch.ones(num_tokens, 4, 8), k, v, None)
        written.append(torch.cat([x.view(torch.uint8) for x in (cache.layers[0].keys, cache.layers[0].values)]))
    return (written[0] != written[1]).double().mean().item()


def main() -> None:
    triton_attention._MIN_PART_KEYS = 16
    triton_attention._FEW_TOKENS, triton_attention._ROTATED_TOKENS = 8, 4
    triton_attention._PREFILL = replace(triton_attention._PREFILL, rows=32, keys=32)
    triton_attention._PREFILL_IN_WINDOW = triton_attention._PREFILL
    triton_attention._DECODE = replace(triton_attention._DECODE, keys=16)
    tiles.LATENT_FP32 = replace(tiles.LATENT_FP32, rows=16, keys=16)
    fp8 = torch.float8_e4m3fn
    six_sinks = torch.randn(6, generator=torch.Generator().manual_seed(1))
    large, tiny = torch.full((4,), 5.0), torch.full((4,), -50.0)
    pick: dict[str, Callable[[], float]] = {
        "full in parts, sinks": lambda: error_of(GQA, MIXED[2:4], SINKS, processors=64),
        "window of 128 at its edges": lambda: error_of(SLIDING, WINDOW_EDGES, large),
        "three heads a group, rotated": lambda: error_of(ODD_HEADS, MIXED[:3], six_sinks, is_rotated=True),
        "latents in parts": lambda: error_of(MLA, MIXED[2:4], SINKS, processors=64),
        "latents, odd dims, window 9": lambda: error_of(ODD_LATENT, MIXED[2:], SINKS[:3], processors=64),
        "FP8 bytes that are not torch's": fp8_bytes_unlike_torch,
    }
    rest: dict[str, Callable[[], float]] = {
        "full": lambda: error_of(GQA, MIXED, SINKS),
        "full in parts, no sinks, pages of 1": lambda: error_of(GQA, MIXED, None, processors=64, page_size=1),
        "window of 128 in parts": lambda: error_of(SLIDING, WINDOW_EDGES, tiny, processors=64),
        "three heads a group, odd dims, window 9": lambda: error_of(ODD_HEADS, MIXED, six_sinks, processors=64),
        "a bf16 cache of more than 2^31 numbers, tensors that are parts of others": error_far_away,
        "full in parts, FP8": lambda: error_of(GQA, MIXED[2:4], None, processors=64, kv_dtype=fp8),
        "latents, rotated, pages of 1": lambda: error_of(MLA, MIXED, SINKS, page_size=1, is_rotated=True),
        "latents, 20 heads, FP8, in parts": lambda: error_of(MANY_HEADS, FEW, None, processors=64, kv_dtype=fp8),
    }
    cases = rest if sys.argv[1] == "rest" else pick
    json.dump({name: case() for name, case in cases.items()}, sys.stdout)


if __name__ == "__main__":
    main()
