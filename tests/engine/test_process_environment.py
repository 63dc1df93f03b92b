"""What the engine process inherits: the caller's environment, and huge pages unless the caller decides."""

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


TUNABLES = "glibc.malloc.hugetlb=1"


@pytest.mark.parametrize(("set_to", "seen"), [((None, None), ("1", TUNABLES)), (("0", "a.b=2"), ("0", "a.b=2"))])
def test_huge_pages_are_on_unless_the_caller_decides(monkeypatch, set_to, seen):
    monkeypatch.setenv("SOMETHING_OF_THE_CALLER", "kept")
    names = ("THP_MEM_ALLOC_ENABLE", "GLIBC_TUNABLES")
    for name, value in zip(names, set_to, strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    found = asyncio.run(environment_of_engine())
    assert (*(found[name] for name in names), found["SOMETHING_OF_THE_CALLER"]) == (*seen, "kept")
