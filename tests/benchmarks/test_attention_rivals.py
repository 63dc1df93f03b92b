"""What needs no GPU of `attention_rivals`: the fp32 reference, the errors, and the verdict."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import attention_rivals as rivals
from benchmarks.bench_attention import PAGE_SIZE, Case, make_batch
from model.attention.base import AttentionSpec, make_attention
from model.batch import LayerKv
from tests.tables import rows

HEADS = AttentionSpec(num_heads=4, num_kv_heads=2, key_dim=8, value_dim=8, scale=0.3)
LATENT = AttentionSpec(num_heads=3, num_kv_heads=1, key_dim=12, value_dim=8, scale=0.3, values_in_keys=True)
DECODES = Case("decodes", (1, 1, 1), (20, 3, 33))
PROMPT = Case("prompt", (40,), (70,))


@rows("spec, has_sinks", (HEADS, True), (replace(HEADS, window=8), True), (HEADS, False), (LATENT, False))
@rows("case", DECODES, PROMPT)
def test_the_reference_is_what_torch_attention_computes(spec: AttentionSpec, has_sinks: bool, case: Case) -> None:
    g = torch.Generator().manual_seed(1)
    num_pages = sum(-(-length // PAGE_SIZE) for length in case.seq_lens)
    batch = make_batch(case, g, num_pages)
    kv = spec.kv_spec
    sizes = ((num_pages * PAGE_SIZE, kv.num_heads, dim) for dim in (kv.key_dim, kv.value_dim))
    cache = LayerKv(*(torch.randn(size, generator=g) for size in sizes))
    q, k, v = (
        torch.randn(batch.num_tokens, heads, spec.key_dim, generator=g)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    sinks = torch.randn(spec.num_heads, generator=g) if has_sinks else None
    attention = make_attention("torch", [spec], torch.device("cpu"))
    got = attention.run(spec, attention.plan(batch), cache, q, k, None if spec.values_in_keys else v, sinks)
    want = list(rivals.reference(case, spec, SimpleNamespace(batch=batch, q=q), cache, sinks))
    assert sum(len(values) for _, values in want) == (2 if case is DECODES else rivals.CHECKED_QUERIES)
    assert rivals.worst_error(got, want) < 1e-5
    wrong = got.clone()
    wrong[-1, 0] += 1
    assert rivals.worst_error(wrong, want) > rivals.TOLERANCE
    wrong[-1, 0] = torch.nan
    assert rivals.worst_error(wrong, want) == float("inf")


def test_only_what_is_faster_by_more_than_three_percent_is_named() -> None:
    def row(case: str, fa2: float, fa3: float | None, with_store: float) -> dict[str, object]:
        last = {"failed": "no kernel"} if fa3 is None else {"us": fa3, "with_store_us": with_store + 1}
        return {
            "layer": "full", "case": case, "us": 100.0,
            "flashinfer": {"fa2": {"us": fa2, "with_store_us": with_store}, "fa3": last},
        }  # fmt: skip

    found = rivals.summary([row("a", 98, 120, 99), row("b", 99, 90, 98), row("c", 80, None, 85)], 4)
    assert found == {
        "measured": 3, "left_out": 4, "failed": 1,
        "flashinfer_faster_alone": {"full, b": 0.9, "full, c": 0.8},
        "flashinfer_faster_with_store": {"full, c": 0.85},
    }  # fmt: skip
    nothing = {"us": 1.0, "flashinfer": {"fa2": {"failed": "out of memory"}}}
    assert rivals.ratio(nothing, "us") is None


@rows("layer", *rivals.LAYERS)
def test_every_layer_has_decodes_and_a_prompt(layer: str) -> None:
    all_cases = rivals.cases(layer, quick=False)
    assert {len(case.query_lens) for case in all_cases} == {1, 8, 64, 256}
    assert any(case.query_lens[0] > 1 for case in all_cases)
    assert len(rivals.cases(layer, quick=True)) == 2
    assert max(max(case.seq_lens) for case in all_cases) == pytest.approx(32000 if layer != "latent" else 8192)
