"""The order of `auto`: what was measured comes first, by the nearest shape where nobody measured; the rule is last."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.moe_cases import CASES
from moe import MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.choose import ranking
from moe.choose.ranking import RULE, Ranking, preference, rank_backends
from moe.choose.select import choose_backend
from moe.device import Device
from moe.tables import read_entries
from tests.moe.backends import hostile
from tests.tables import rows

ROOT = Path(__file__).parents[2]
HOPPER, NONE = Device(arch="sm90"), MoeA2ABackend.NONE
GPT_OSS_20B = hostile.make_config(32, 2880, 2880, 4)
TABLES = read_entries(ranking.TABLE)
PREFERENCE = preference()


def ranked(config: MoeRunnerConfig = GPT_OSS_20B, arch: str = "sm90", name: str = "mxfp4") -> Ranking:
    return rank_backends(Device(arch=arch), name, NONE, config)


def test_the_measured_winner_names_its_source() -> None:
    source = ranked().source_of(MoeBackend.TRITON)
    assert source.startswith("moe/tables/backends.json: NVIDIA H100")
    assert "benchmarks/results/moe_h100.json" in source
    assert "nearest" not in source


def test_an_unknown_shape_takes_the_nearest_measured_one_and_says_so() -> None:
    shard = ranked(hostile.make_config(32, 2880, 736, 4))
    assert shard.order == ranked().order
    assert str(shard.source).endswith("nearest measured shape: 32 experts of 2880 x 2880, top-4")
    assert ranked(hostile.make_config(32, 2880, 1, 4)).order == ranked().order


@rows("arch, name", ("sm100", "mxfp4"), ("sm90", "bf16"), ("gfx950", "mxfp4"), ("cpu", "mxfp4"))
def test_where_nobody_measured_the_rule_holds(arch: str, name: str) -> None:
    assert ranked(arch=arch, name=name) == Ranking(PREFERENCE)
    assert rank_backends(HOPPER, "mxfp4", MoeA2ABackend.DEEPEP, GPT_OSS_20B) == Ranking(PREFERENCE)
    for backend in PREFERENCE:
        assert Ranking(PREFERENCE).source_of(backend) == f"{RULE}; nobody measured this format on this GPU"


DEEPSEEK = hostile.make_config(256, 7168, 2048, 8)


@rows(
    "name, config, measured",
    ("fp8_block", DEEPSEEK, (MoeBackend.TRITON, MoeBackend.FLASHINFER_CUTLASS)),
    ("mxfp4", GPT_OSS_20B, (MoeBackend.TRITON, MoeBackend.FLASHINFER_MXFP4)),
    ("nvfp4", DEEPSEEK, (MoeBackend.TRITON,)),
)
def test_what_nobody_measured_comes_after_what_was(
    name: str, config: MoeRunnerConfig, measured: tuple[MoeBackend, ...]
) -> None:
    """G66: DeepGEMM is in no table of the H100, so it neither wins there nor is called measured."""
    ranking = ranked(config, name=name)
    assert ranking.measured == measured == ranking.order[: len(measured)]
    assert choose_backend(MoeBackend.AUTO, HOPPER, name, NONE, config) is measured[0]
    for backend in PREFERENCE:
        words = "NVIDIA H100" if backend in measured else f"{RULE}; nobody measured {backend} on this GPU"
        assert words in ranking.source_of(backend)


def entry(times: dict[str, list[float]], **shape: int) -> dict[str, Any]:
    return TABLES[0] | {
        "shape": TABLES[0]["shape"] | shape,
        "card": f"card {shape}",
        "microseconds": {name: {str(1 << i): time for i, time in enumerate(row)} for name, row in times.items()},
    }


def test_the_nearest_shape_counts_and_a_mean_over_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [
        entry({"triton": [1, 100], "flashinfer_mxfp4": [20, 20]}, intermediate_size=2880),  # means 10 and 20
        entry({"triton": [10, 10], "flashinfer_mxfp4": [1, 50]}, intermediate_size=360),  # means 10 and 7
        entry({"triton": [10, 10], "flashinfer_mxfp4": [1, 1]}, num_experts=128),
    ]
    monkeypatch.setattr(ranking, "read_entries", lambda name: tables)
    triton_first = (MoeBackend.TRITON, MoeBackend.FLASHINFER_MXFP4)
    assert ranked().measured == triton_first
    assert ranked(hostile.make_config(32, 2880, 512, 4)).measured == triton_first[::-1]
    larger = ranked(hostile.make_config(128, 2880, 2880, 4))
    assert larger.measured == triton_first[::-1]
    assert "nearest" not in str(larger.source), "equal in every number"


def test_every_backend_has_one_place_whatever_was_measured() -> None:
    for table in TABLES:
        config = hostile.make_config(*(table["shape"][name] for name in ("num_experts", "hidden_size")), 64, 4)
        order = rank_backends(Device(arch=table["gpu"]), table["format"], MoeA2ABackend(table["a2a"]), config).order
        assert sorted(order) == sorted(PREFERENCE)


def test_the_table_repeats_what_the_benchmark_recorded() -> None:
    """Rows are those of the file that is named as the source; backends share their token counts."""
    for table in TABLES:
        counts = [list(row) for row in table["microseconds"].values()]
        assert counts.count(counts[0]) == len(counts)
        record = json.loads((ROOT / table["source"]).read_text(encoding="utf-8"))
        assert record["environment"]["card"] == table["card"]
        shape = table["shape"]
        (model,) = (case.model for case in CASES.values() if shape == {name: getattr(case, name) for name in shape})
        rows: dict[str, dict[str, float]] = {}
        for row in record["rows"]:
            if (row["model"], row["format"], row["routing"]) == (model, table["format"], "uniform"):
                rows.setdefault(row["backend"], {})[str(row["tokens"])] = row["us"]
        assert table["microseconds"] == {name: rows[name] for name in table["microseconds"]}
