"""`plan_vs_start` and `bench_start` read what the engine really logs."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.bench_start import read_start
from benchmarks.plan_vs_start import LogError, compare, gpu_gib
from engine import load
from engine.cuda_graphs import capture_all
from engine.kv_cache import KvLayout, choose_cuda_pages
from model.batch import KvLayerSpec

MODEL = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"
MIB, GIB = 1 << 20, 1 << 30
PLAN = {
    "weights": {"processed": 10 * GIB, "peak_while_loading": 12 * GIB},
    "estimates": {
        "context": 700 * MIB, "activations": GIB, "sampling": GIB // 2, "graphs": GIB // 8, "graph_buffers": GIB // 8,
    },
    "kv_cache": {"bytes": 60 * GIB, "pages": 1000, "tokens": 16000},
}  # fmt: skip


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> str:
    """Of a start on a GPU of 80 GiB that is not there; the line of the KV cache is that of a start on this CPU."""
    device = torch.device("cuda")
    numbers = {"memory_allocated": 10, "max_memory_allocated": 12, "memory_reserved": 11}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device=None, value=value: value * GIB)
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (68 * GIB, 80 * GIB))
    caplog.set_level(logging.INFO)
    config = load.EngineConfig(model=MODEL, selfcheck="off", num_pages=100)
    load._weight_bytes(config, device, None)
    layout = KvLayout(specs=(KvLayerSpec(num_heads=1, key_dim=8, value_dim=8),), page_size=16, dtype=torch.float32)
    choose_cuda_pages(layout, device=device, utilization=0.9, sampling_bytes=3 * GIB // 4, profile_run=lambda: None)
    capture_all("decode steps", [1, 2], lambda size: SimpleNamespace(size=size))
    load.load_engine(config, None)
    return caplog.text


def test_every_part_of_the_plan_stands_beside_what_was_measured(log: str) -> None:
    rows = {row.part: (row.planned, row.actual) for row in compare(PLAN, log)}
    (planned_bytes, _), (_, pages), (_, tokens) = (rows.pop(f"KV {what}") for what in ("cache", "pages", "tokens"))
    assert rows == {
        "weights": (10240, 10240), "peak while loading": (12288, 12288),
        "context": (700, 1024),  # 12 GiB in use, 11 of them torch's
        "activations": (1024, 2048), "sampling": (512, None), "graphs": (128, 0), "graph buffers": (128, None),
    }  # fmt: skip
    assert (planned_bytes, pages) == (61440, 200)  # 100 of each kind
    assert tokens > 0
    assert gpu_gib(log) == 80


def test_a_log_of_a_cpu_is_refused() -> None:
    with pytest.raises(LogError, match="no line that begins with 'weights'"):
        compare(PLAN, "KV cache: 10 tokens fit, 2 pages of 16 tokens, 1 MiB")


def test_a_start_says_how_many_kernels_came_late() -> None:
    text = (
        "10:00 INFO moe.kernels.compile_ahead: self-check of mxfp4: compiled or loaded 15 kernels ahead in 4.5 s with "
        "16 workers\n10:01 INFO x: warm-up: compiled or loaded 30 kernels ahead in 3.0 s with 16 workers\n"
        "10:02 INFO loaders.phases: ready after 20.0 s: starting 5.0 s\n"
    )
    start = read_start(text, 21.5, num_new=47)
    assert (start.ready_s, start.num_ahead, start.ahead_s, start.num_late) == (21.5, 45, 7.5, 2)
    assert start.phases == "ready after 20.0 s: starting 5.0 s"
    assert read_start(text, 9.0, num_new=0).num_late == 0
