"""What `moe-serve explain` says of attention: who is chosen, and by which figures."""

import json

import pytest

from benchmarks import attention_tables, record
from model.attention.base import AttentionSpec
from model.attention.explain import explain
from model.attention.measured import read_tables
from tests.tables import rows

HEADS = AttentionSpec(num_heads=64, num_kv_heads=8, key_dim=64, value_dim=64, scale=0.125)
LATENT = AttentionSpec(num_heads=96, num_kv_heads=1, key_dim=576, value_dim=512, scale=0.1, values_in_keys=True)
WIDE = AttentionSpec(num_heads=2, num_kv_heads=1, key_dim=1024, value_dim=1024, scale=0.1)


def entry(rival: str, *shares: float, kind: str = "heads") -> dict[str, object]:
    cases = {f"case {index}": share for index, share in enumerate(shares)}
    return {"gpu": "sm90", "kind": kind, "rival": rival, "card": "H900", "source": "a.json", "shares": cases}


def line(name: str, text: str) -> str:
    return next(each for each in text.splitlines() if each.startswith(name))


@pytest.fixture(autouse=True)
def needs_triton() -> None:
    pytest.importorskip("triton")


def test_measured_layers_name_the_figures_and_their_source() -> None:
    text = explain([HEADS], "sm90", [entry("torch", 0.02, 0.25), entry("torch", 0.5, kind="latent")])
    figures = "triton takes 0.02 to 0.25 of torch's time in 2 cases of heads (H900, a.json)"
    assert line("triton", text).endswith(f"usable  <- auto, by model/attention/measured.json: {figures}")
    assert line("torch", text).split() == ["torch", "usable"]


@rows(
    "shares, told",
    ((), "not measured"),
    ((0.7, 1.03), "triton takes 0.70 to 1.03 of flashinfer's time in 2 cases of heads (H900, a.json)"),
    ((0.7, 1.04, 1.5), "(H900, a.json); more than 3 % slower in case 1 (1.04), case 2 (1.50)"),
)
def test_flashinfer_is_named_with_what_was_measured(shares: tuple[float, ...], told: str) -> None:
    text = explain([HEADS], "sm90", [entry("flashinfer", *shares)] if shares else [])
    assert line("flashinfer", text).startswith("flashinfer  it serves latent attention (MLA) alone; ")
    assert line("flashinfer", text).endswith(told)


@rows(
    "spec, arch, chosen, told",
    (HEADS, "cpu", "torch", "rule: the Triton kernels need a GPU"),
    (HEADS, "gfx942", "triton", "nobody measured these layers against torch on this GPU"),
    (LATENT, "sm90", "triton", "nobody measured these layers against torch on this GPU"),
    (WIDE, "sm90", "torch", "nobody measured these layers against torch on this GPU"),
)
def test_without_figures_the_rule_is_named(spec: AttentionSpec, arch: str, chosen: str, told: str) -> None:
    text = explain([spec], arch, [])
    assert "<- auto" in line(chosen, text)
    assert line(chosen, text).endswith(told)
    assert text.count("<- auto") == 1


def test_a_layer_that_the_kernels_cannot_serve_says_why() -> None:
    assert "head dims up to" in line("triton", explain([HEADS, WIDE], "sm90", []))


@rows("name, rival", ("attention_h200", "torch"), ("attention_rivals_h200", "flashinfer"))
def test_the_tables_in_the_tree_are_what_the_results_give(name: str, rival: str) -> None:
    result = json.loads((record.RESULTS / f"{name}.json").read_text())
    source = f"benchmarks/results/{name}.json"
    tables = [each for each in read_tables() if each["source"] == source]
    assert {each["rival"] for each in tables} == {rival}
    assert tables == attention_tables.tables_of(result, source)


def test_flashinfers_best_kernel_counts_with_its_store() -> None:
    fa2, fa3 = {"us": 8.0, "with_store_us": 12.0}, {"us": 9.0, "with_store_us": 10.0}
    made = [
        {"layer": "full", "case": "a", "us": 5.0, "flashinfer": {"fa2": fa2, "fa3": fa3}},
        {"layer": "latent", "case": "b", "us": 6.0, "flashinfer": {"fa2": {"us": 3.0}, "fa3": {"failed": "no"}}},
        {"layer": "full", "case": "c", "us": 6.0, "flashinfer": {"fa2": {"failed": "no"}}},
    ]
    heads, latent = attention_tables.tables_of({"card": "NVIDIA H200", "rows": made}, "x.json")
    assert (heads["kind"], heads["shares"]) == ("heads", {"full, a": 0.5})
    assert (latent["kind"], latent["gpu"], latent["shares"]) == ("latent", "sm90", {"latent, b": 2.0})
    with pytest.raises(KeyError, match="_CARDS"):
        attention_tables.tables_of({"card": "Banana", "rows": []}, "x.json")
