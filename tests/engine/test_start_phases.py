"""Phases of a start on their way: from a real load, and from the engine process to its client."""

import asyncio
from pathlib import Path

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.core import EngineCore
from loaders.phases import StartPhases

FOLDER = Path(__file__).parents[2] / "assets" / "tiny-gpt-oss"


async def until(client, condition):
    async with asyncio.timeout(60):
        while not condition():
            assert client.failure is None
            await asyncio.sleep(0.02)


def test_the_client_hears_how_far_a_start_is():
    async def main():
        client = EngineClient(EngineConfig(model=Path("layers")), worker_module="tests.engine.fake_worker")
        assert client.start_progress is None
        await client.start()
        try:
            await until(client, lambda: client.start_progress and client.start_progress.phase == "loading weights")
            first = client.start_progress
            assert (first.done, first.total) == (7, 24)
            assert [(each.phase, each.num_bytes) for each in first.phases] == [
                ("starting", 0),
                ("loading weights", 2**30),
            ]
            await until(client, lambda: client.start_progress.elapsed_s > first.elapsed_s + 0.3)
            assert client.start_progress.phases[1].seconds > first.phases[1].seconds
        finally:
            await client.close()

    asyncio.run(main())


def test_once_ready_there_is_no_start_and_nothing_was_compiled():
    async def main():
        client = EngineClient(EngineConfig(model=Path("fake")), worker_module="tests.engine.fake_worker")
        await client.start()
        try:
            await until(client, lambda: client.ready and client.stats is not None)
            assert client.start_progress is None
            assert client.stats.num_kernels_compiled_after_ready == 0
        finally:
            await client.close()

    asyncio.run(main())


def test_a_load_goes_through_its_phases_in_order():
    phases = StartPhases()
    EngineCore(EngineConfig(model=FOLDER, selfcheck="all", max_model_len=64, num_pages=16), phases=phases)
    phases.finish()
    progress = phases.progress()
    assert [each.phase for each in progress.phases] == [
        "starting", "reading headers", "loading weights", "processing weights", "self-check", "warming up",
    ]  # fmt: skip
    assert [each.total for each in progress.phases] == [0, 0, 6, 6, 6, 0]
    assert all(each.done == each.total for each in progress.phases)
    assert abs(sum(each.seconds for each in progress.phases) - progress.elapsed_s) < 1e-6
