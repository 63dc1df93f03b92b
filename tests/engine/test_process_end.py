"""A process that ends before it is told what to do: its exit status says so, and nothing else does."""

import asyncio

import pytest
import uvloop

from engine.process import WorkerProcess


@pytest.mark.parametrize("loop_factory", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_process_that_ends_at_once_has_its_exit_status(loop_factory, monkeypatch, capfd):
    start = asyncio.create_subprocess_exec

    async def start_and_wait(*command, **settings):
        process = await start(*command, **settings)
        await process.wait()
        await asyncio.sleep(0.05)  # until the loop has closed the pipe
        return process

    async def main():
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_wait)
        process = await WorkerProcess.start("tests.no_such_module", "an order")
        return await process.wait()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(main()) == 1
    assert "No module named tests.no_such_module" in capfd.readouterr().err
