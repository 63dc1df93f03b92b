"""Runs the Triton attention kernels in Triton's interpreter, on the CPU; prints each case's largest error as JSON.

Started as a program of its own, since Triton decides when it is imported whether it compiles or interprets.
"""

import json
import sys
from dataclasses import replace

import torch

from model.attention import triton as triton_attention
from model.attention.base import AttentionSpec, make_attention
from tests.model.attention_cases import GQA, SLIDING, Requests, Sequence, worst_error

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
MIXED = [
    {"a": 5, "b": 70},
    {"b": 1, "a": 1},
    {"c": 17, "a": 1, "b": 40, "d": 1},
    {"a": 1, "b": 1, "c": 1, "d": 1},
    {"d": 30, "b": 1, "c": 1},
]
WINDOW_EDGES = [{"a": 126}, {"a": 1}, {"a": 1}, {"a": 1}, {"a": 2}]
ODD_HEADS = AttentionSpec(num_heads=6, num_kv_heads=2, key_dim=24, value_dim=20, scale=0.2, window=9)


def error_of(
    spec: AttentionSpec,
    steps: list[dict[str, int]],
    sinks: torch.Tensor | None,
    *,
    processors: int = 1,
    page_size: int = 16,
    is_rotated: bool = False,
) -> float:
    lengths = {name: sum(step.get(name, 0) for step in steps) for name in "abcd"}
    sequences = {n: Sequence(spec, length, seed, sinks) for seed, (n, length) in enumerate(lengths.items()) if length}
    attention = make_attention("triton", [spec], torch.device("cpu"))
    attention._num_processors = processors  # type: ignore[attr-defined]
    return worst_error(attention, Requests(spec, sequences, sinks, page_size, is_rotated), steps)


def main() -> None:
    triton_attention._MIN_PART_KEYS = 16
    triton_attention._PREFILL = replace(triton_attention._PREFILL, rows=32, keys=32)
    triton_attention._PREFILL_IN_WINDOW = triton_attention._PREFILL
    triton_attention._DECODE = replace(triton_attention._DECODE, keys=16)
    six_sinks = torch.randn(6, generator=torch.Generator().manual_seed(1))
    large, tiny = torch.full((4,), 5.0), torch.full((4,), -50.0)
    errors = {
        "full": error_of(GQA, MIXED, SINKS),
        "full in parts, no sinks, pages of 1": error_of(GQA, MIXED, None, processors=64, page_size=1),
        "full in parts, sinks": error_of(GQA, MIXED[2:4], SINKS, processors=64),
        "window of 128 at its edges": error_of(SLIDING, WINDOW_EDGES, large),
        "window of 128 in parts": error_of(SLIDING, WINDOW_EDGES, tiny, processors=64),
        "three heads a group, odd dims, window 9": error_of(ODD_HEADS, MIXED, six_sinks, processors=64),
        "three heads a group, rotated": error_of(ODD_HEADS, MIXED[:3], six_sinks, is_rotated=True),
    }
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main()
