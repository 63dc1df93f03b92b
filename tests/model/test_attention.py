"""Paged attention against a dense reference: windows, sinks, chunks, mixed batches, odd page tables, latent values."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import model.attention.torch as torch_attention
from model.attention.base import AttentionSpec, make_attention
from model.config import ModelSettingsError, UnsupportedModelError
from tests.model.attention_cases import GQA, MLA, SLIDING, Requests, Sequence, worst_error
from tests.model.paged import PagedCache
from tests.tables import rows


def run_steps(
    spec: AttentionSpec, sequences: dict[str, Sequence], steps: list[dict[str, int]], sinks: torch.Tensor | None
) -> None:
    """Feed the given number of tokens of each request per step, and compare every output row."""
    attention = make_attention("auto", [spec], torch.device("cpu"))
    assert worst_error(attention, Requests(spec, sequences, sinks), steps) < 2e-5


def test_window_of_128_at_its_edges_in_prefill_and_in_decode(subtests: pytest.Subtests) -> None:
    for length, sink in itertools.product([127, 128, 129, 300], [None, 0.0, 2.0, -50.0]):
        with subtests.test(length=length, sink=sink):
            sinks = None if sink is None else torch.full((4,), sink)
            sequences = {"a": Sequence(SLIDING, length + 4, length, sinks)}
            run_steps(SLIDING, sequences, [{"a": length}, {"a": 1}, {"a": 1}, {"a": 2}], sinks)


@rows("spec", GQA, SLIDING, MLA)
def test_mixed_batches_of_chunks_and_decodes_in_any_order(spec: AttentionSpec) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    sequences = {name: Sequence(spec, 220, seed, sinks) for seed, name in enumerate("abcd")}
    steps = [
        {"a": 5, "b": 140},
        {"b": 1, "a": 1},
        {"c": 17, "a": 1, "b": 60, "d": 1},
        {"a": 1, "b": 1, "c": 1, "d": 1},
        {"d": 30, "b": 1, "c": 1},
    ]
    run_steps(spec, sequences, steps, sinks)


def test_requests_of_equal_length_need_no_mask_and_agree() -> None:
    sequences = {name: Sequence(GQA, 40, seed, None) for seed, name in enumerate("abc")}
    run_steps(GQA, sequences, [{"a": 33, "b": 33, "c": 33}] + [{"a": 1, "b": 1, "c": 1}] * 3, None)


def test_bounds_on_gathered_keys_and_scores_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "_MAX_DECODE_KEYS", 64)
    monkeypatch.setattr(torch_attention, "_MAX_SCORES", 4 * 64 * 7)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    spec = replace(GQA, window=9)
    for kind in (GQA, spec):
        sequences = {name: Sequence(kind, 90, seed, sinks) for seed, name in enumerate("abcd")}
        steps = [{"a": 5, "b": 50, "c": 80, "d": 31}, {"c": 1, "b": 1, "d": 1, "a": 1}, {"a": 30, "b": 1}]
        run_steps(kind, sequences, steps, sinks)


def test_no_decode_group_gathers_more_keys_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding counts as keys. A request longer than the bound forms a group alone; every request is in one group."""
    monkeypatch.setattr(torch_attention, "_MAX_DECODE_KEYS", 64)
    cache = PagedCache([GQA.kv_spec])
    lengths = {"a": 5, "b": 70, "c": 20, "d": 31, "e": 9, "f": 30}
    cache.batch({name: [0] * (length - 1) for name, length in lengths.items()})
    plan = make_attention("torch", [GQA], torch.device("cpu")).plan(cache.batch({name: [0] for name in lengths}))
    groups = plan.groups[GQA]
    assert all(
        group.vectors_J.numel() <= 64 * GQA.num_kv_heads or group.vectors_J.numel() == GQA.num_kv_heads * group.num_keys
        for group in groups
    )
    rows = torch.cat([group.rows for group in groups if group.rows is not None])
    assert sorted(rows.tolist()) == list(range(6))
    assert sum(group.vectors_J.numel() > GQA.num_kv_heads * group.num_keys for group in groups) >= 2, (
        "short ones share a group"
    )


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that is made."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.num_elements = max(self.num_elements, out.numel())
        return out


@rows("spec", GQA, SLIDING)
def test_a_long_request_does_not_make_the_plan_of_short_ones_large(spec: AttentionSpec) -> None:
    cache = PagedCache([spec.kv_spec], num_pages=300)
    lengths = {"long": 4000} | {f"short {index}": 20 for index in range(20)}
    cache.batch({name: [0] * length for name, length in lengths.items()})
    batch = cache.batch({name: [0, 0] if name == "long" else [0] for name in lengths})
    with LargestTensor() as made:
        make_attention("torch", [spec], torch.device("cpu")).plan(batch)
    assert made.num_elements <= 2 * 4002, "two queries of the long one"


@rows("window, most_blocks", (128, 6), (8192, 70))
def test_g46_blocks_are_sized_by_the_keys_a_query_can_see(window: int, most_blocks: int) -> None:
    """GPT-OSS at 32k: a chunk of 2,048 queries was 256 blocks in every layer, also where a query sees 128 keys."""
    spec = AttentionSpec(num_heads=64, num_kv_heads=8, key_dim=8, value_dim=8, scale=1.0, window=window)
    cache = PagedCache([], num_pages=2048, page_size=16)
    cache.batch({"a": [0] * 30720})
    plan = make_attention("torch", [spec], torch.device("cpu")).plan(cache.batch({"a": [0] * 2048}))
    blocks = plan.blocks[spec]
    assert len(blocks) <= most_blocks
    assert [blocks[0].start, blocks[-1].stop] == [0, 2048]
    for block in blocks:
        assert 64 * block.mask_QL.numel() <= torch_attention._MAX_SCORES


def test_sink_golden_value() -> None:
    """Scaled scores [1, 2] and a sink of 0.5 leave probabilities 0.231224 and 0.628532 to the keys."""
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, key_dim=1, value_dim=2, scale=0.5)
    cache = PagedCache([spec.kv_spec])
    attention = make_attention("torch", [spec], torch.device("cpu"))
    batch = cache.batch({"a": [0, 0]})
    q, k = torch.tensor([0.0, 2.0]).view(2, 1, 1), torch.tensor([1.0, 2.0]).view(2, 1, 1)
    values = torch.eye(2)[:, None]
    out = attention.run(spec, attention.plan(batch), cache.layers[0], q, k, values, torch.tensor([0.5]))
    torch.testing.assert_close(out[1, 0], torch.tensor([0.231224, 0.628532]), rtol=0, atol=1e-6)


def test_bf16_stays_near_fp32() -> None:
    sequence = Sequence(SLIDING, 200, 3, None)
    cache = PagedCache([SLIDING.kv_spec], dtype=torch.bfloat16)
    attention = make_attention("torch", [SLIDING], torch.device("cpu"))
    batch = cache.batch({"a": list(range(200))})
    q, k, v = (x.bfloat16() for x in (sequence.q, sequence.k, sequence.v))
    out = attention.run(SLIDING, attention.plan(batch), cache.layers[0], q, k, v, None)
    assert out.dtype == torch.bfloat16
    assert (out.double() - sequence.want).norm() / sequence.want.norm() < 2e-2  # four roundings of 2^-9


@rows("spec", GQA, MLA)
def test_fp8_cache_is_read_as_the_numbers_it_holds(spec: AttentionSpec) -> None:
    """Keys and values that FP8 holds exactly, so that only the sums differ from the reference."""
    sequences = {n: Sequence(spec, 60, i, None, torch.float8_e4m3fn) for i, n in enumerate("ab")}
    attention = make_attention("torch", [spec], torch.device("cpu"))
    requests = Requests(spec, sequences, None, kv_dtype=torch.float8_e4m3fn)
    assert worst_error(attention, requests, [{"a": 40, "b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 50}]) < 2e-5


@rows("dtype", torch.float32, torch.bfloat16)
def test_fp8_cache_rounds_to_even_and_saturates(dtype: torch.dtype) -> None:
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, key_dim=8, value_dim=8, scale=1.0)
    cache = PagedCache([spec.kv_spec], dtype=torch.float8_e4m3fn)
    attention = make_attention("torch", [spec], torch.device("cpu"))
    batch = cache.batch({"a": [0]})
    x = torch.tensor([1.0625, 1.1875, 2**-10, 3 * 2**-10, 1e4, -1e4, float("inf"), 0.0], dtype=dtype).view(1, 1, 8)
    out = attention.run(spec, attention.plan(batch), cache.layers[0], torch.ones_like(x), x, -x, None)
    want = torch.tensor([1.0, 1.25, 0.0, 2**-8, 448.0, -448.0, 448.0, 0.0], dtype=dtype)
    assert torch.equal(cache.layers[0].keys[batch.slots_T[0], 0].to(dtype), want)
    assert torch.equal(out[0, 0], -want)


def test_unknown_implementation_and_impossible_heads_are_refused() -> None:
    with pytest.raises(ModelSettingsError, match="known: auto, flashinfer, triton, torch"):
        make_attention("flash9", [GQA], torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="5 query heads"):
        replace(GQA, num_heads=5)
