"""What the engine process inherits: the caller's environment, and huge pages for tensors unless the caller decides."""

import asyncio
from pathlib import Path

import pytest

from engine.client import EngineClient
from engine.config import EngineConfig


async def environment_of_engine():
    client = EngineClient(EngineConfig(model=Path("fake")), worker_module="tests.engine.fake_worker")
    await client.start()
    try:
        while not client.ready:
            assert client.failure is None
            await asyncio.sleep(0.02)
        entries = Path(f"/proc/{client.pid}/environ").read_text().split("\0")
    finally:
        await client.close()
    return dict(entry.split("=", 1) for entry in entries if entry)


@pytest.mark.parametrize(("set_to", "seen"), [(None, "1"), ("0", "0")])
def test_huge_pages_are_on_unless_the_caller_decides(monkeypatch, set_to, seen):
    monkeypatch.setenv("SOMETHING_OF_THE_CALLER", "kept")
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    if set_to is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", set_to)
    found = asyncio.run(environment_of_engine())
    assert (found["THP_MEM_ALLOC_ENABLE"], found["SOMETHING_OF_THE_CALLER"]) == (seen, "kept")
