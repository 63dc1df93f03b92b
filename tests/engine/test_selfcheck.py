"""What the load-time check of the MoE layers means for the engine: its report, and a corrupted layout that stops it."""

import asyncio
import re
import time
from pathlib import Path

import pytest

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.core import EngineCore
from model.errors import ModelSettingsError
from moe import SelfCheckError
from moe.backends.torch.backend import TorchBackend
from tests.engine import corrupt_worker
from tests.tables import rows

FOLDER = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"
NUM_LAYERS = 6
WRONG = r"layer 1, torch/none/mxfp4: expert \d+ differs from the reference by [\d.e+-]+ in outputs \d+\.\.\d+; the tol"


def config(**settings: object) -> EngineConfig:
    return EngineConfig(model=FOLDER, device="cpu", num_pages=64, **settings)  # type: ignore[arg-type]


@rows("selfcheck, layers", ("auto", [0]), ("off", []), ("first", [0]), ("all", list(range(NUM_LAYERS))))
def test_the_engine_reports_every_layer_that_was_checked(selfcheck: str, layers: list[int]) -> None:
    checks = EngineCore(config(selfcheck=selfcheck, num_threads=1)).info.selfcheck
    assert [check.layer for check in checks] == layers
    for check in checks:
        assert check.path == "torch/none/mxfp4"
        assert 0 < check.worst_error <= check.tolerance == 1e-5


def test_a_corrupted_layout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrupt_worker, "_layers", [])
    monkeypatch.setattr(TorchBackend, "prepare", corrupt_worker.prepare)
    with pytest.raises(SelfCheckError, match=WRONG):
        EngineCore(config(selfcheck="all"))


def test_an_engine_process_with_a_corrupted_layout_never_becomes_ready() -> None:
    async def main() -> str | None:
        client = EngineClient(config(selfcheck="all", num_threads=1), worker_module="tests.engine.corrupt_worker")
        await client.start()
        try:
            end = time.monotonic() + 60
            while client.failure is None and time.monotonic() < end:
                assert not client.ready
                await asyncio.sleep(0.02)
            assert not client.ready
            return client.failure
        finally:
            await client.close()

    failure = asyncio.run(main())
    assert failure is not None
    assert re.search(WRONG, failure)


@rows("name", "deepep", "mori")
def test_a_transport_without_other_ranks_is_refused(name: str) -> None:
    with pytest.raises(ModelSettingsError, match=rf"moe_a2a_backend is {name}.*but there is one rank: set it to none"):
        EngineCore(config(moe_a2a_backend=name, moe_backend="torch"))
