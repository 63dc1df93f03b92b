"""The table of the MoE benchmark from its rows."""

import json
from pathlib import Path
from typing import Any

from benchmarks import moe_ratios


def row(backend: str, tokens: int, us: float, **changes: Any) -> dict[str, Any]:
    return {
        "model": "m", "format": "mxfp4", "routing": "uniform", "backend": backend, "tokens": tokens, "us": us,
        "floor_us": 10.0, "active_experts": 4, "card": "H100",
    } | changes  # fmt: skip


ROWS = [
    row("triton", 1, 20.0), row("flashinfer", 1, 70.0), row("triton_kernels", 1, 60.0),
    row("triton_kernels_bare", 1, 44.0),
    row("triton", 4, 50.0), row("flashinfer", 4, 40.0),
    row("triton", 1, 30.0, routing="zipf"),
    row("flashinfer", 64, 1.0),
]  # fmt: skip


def test_the_best_rival_of_the_same_case_counts() -> None:
    table = moe_ratios.ratios(ROWS)
    assert [(r["routing"], r["tokens"], r["rival"], r["ratio"], r["part_ratio"], r["of_floor"]) for r in table] == [
        ("uniform", 1, "triton_kernels", 3.0, 2.2, 0.5),
        ("uniform", 4, "flashinfer", 0.8, None, 0.2),
        ("zipf", 1, None, None, None, 0.33),
    ]


def test_nvfp4_is_compared_with_our_own_fp8_blocks() -> None:
    rows = [row("triton", 1, 30.0, format="nvfp4"), row("triton", 1, 45.0, format="fp8_block")]
    fp8, nvfp4 = moe_ratios.ratios(rows)
    assert (fp8["rival"], nvfp4["rival"], nvfp4["ratio"]) == (None, "triton fp8_block", 1.5)


def test_the_table_has_a_heading_per_case_and_a_line_per_number_of_tokens() -> None:
    text = moe_ratios.markdown(moe_ratios.ratios(ROWS))
    assert text.startswith("m, mxfp4, uniform routing")
    assert "| 1 | 4 | 10.0 | 20.0 | 0.50 | 60.0 triton_kernels | 3.00 | 2.20 |" in text
    assert "m, mxfp4, zipf routing" in text
    assert "| 1 | 4 | 10.0 | 30.0 | 0.33 | none |  |  |" in text


def test_later_documents_replace_rows(tmp_path: Path) -> None:
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for path, rows in zip(paths, (ROWS, [row("triton", 1, 10.0)]), strict=True):
        path.write_text(json.dumps({"rows": rows}))
    loaded = moe_ratios.load(paths)
    assert len(loaded) == len(ROWS)
    assert moe_ratios.ratios(loaded)[0]["ratio"] == 6.0
