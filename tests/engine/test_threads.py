"""G09: how many threads the engine process takes for a step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import core, worker
from engine.config import EngineConfig
from loaders.phases import StartPhases
from tests.tables import rows


@rows("usable, wanted, threads", (4, None, 3), (1, None, 1), (2, None, 1), (4, 7, 7))
def test_g09_a_step_takes_all_usable_cpus_but_one_unless_told(
    monkeypatch: pytest.MonkeyPatch, usable: int, wanted: int | None, threads: int
) -> None:
    taken: list[int] = []
    monkeypatch.setattr("moe.cpu.threads.usable_cpus", lambda: usable)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(core, "EngineCore", lambda config, phases: None)
    setup: Any = SimpleNamespace(config=EngineConfig(model=Path("unread"), num_threads=wanted))
    worker.build_core(setup, StartPhases())
    assert taken == [threads]
