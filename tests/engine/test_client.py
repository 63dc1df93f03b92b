"""EngineClient and a real engine process around a scripted core: streams, aborts, deaths, health."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import zmq

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.messages import bind, new_address
from engine.types import EngineStats
from tests.engine.requests import request, tokens_of
from tests.tables import rows

DEADLINE_S = 30.0  # only a failing test waits this long
LONG = 400  # tokens of an answer that does not end by itself within a test


@contextlib.asynccontextmanager
async def running(model="fake", **settings):
    config = EngineConfig(model=Path(model), device="cpu", **settings)
    client = EngineClient(config, worker_module="tests.engine.fake_worker")
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def until(condition):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.005)


async def collect(client, item):
    return [output async for output in client.generate(item)]


def is_idle(stats: EngineStats | None) -> bool:
    return stats is not None and (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)


def test_requests_stream_and_end_once():
    async def main():
        async with running() as client:
            assert client.alive
            assert not client.ready
            early = await collect(client, request("early", [1]))
            assert [output.overloaded for output in early] == [True]
            await until(lambda: client.ready)
            assert client.info.vocab_size == 97
            runs = await asyncio.gather(
                *(collect(client, request(f"r{i}", [i], 9, ignore_eos=True)) for i in range(1, 20))
            )
            assert all(len(tokens_of(outputs)) == 9 for outputs in runs)
            assert all([o.finish_reason for o in outputs] == [None] * 8 + ["length"] for outputs in runs)
            await until(lambda: is_idle(client.stats) and client.stats.num_generated_tokens == 171)
            assert client.heartbeat_age_s < 5
            refused = await collect(client, request("bad", [1], top_p=7.0))
            assert refused[0].error_param == "top_p"
            assert not client._inlets
            first, second = (client.generate(request("twice", [1], 9, ignore_eos=True)) for _ in range(2))
            waiting = asyncio.create_task(anext(first))
            await asyncio.sleep(0)  # the first is sent, and nothing of it has been read yet: it is surely running
            with pytest.raises(ValueError, match="in use"):
                await anext(second)
            await waiting
            assert [output.finish_reason async for output in first] == [None] * 7 + ["length"]
        assert not client.alive
        assert client.failure is None

    asyncio.run(main())


def test_leaving_aborts_exactly_once_and_only_before_the_finish(monkeypatch):
    async def main():
        async with running("slow") as client:
            await until(lambda: client.ready)
            sent = []
            send = client._send
            monkeypatch.setattr(client, "_send", lambda message: (sent.append(message), send(message)))

            stream = client.generate(request("leaver", [1], LONG, ignore_eos=True))
            await anext(stream)
            await stream.aclose()
            await stream.aclose()
            client.abort("leaver")
            assert [type(message).__name__ for message in sent] == ["Add", "Abort"]

            sent.clear()
            stream = client.generate(request("stopped", [1], LONG, ignore_eos=True))
            await anext(stream)
            client.abort("stopped")
            client.abort("stopped")
            assert [output.finish_reason async for output in stream][-1] == "abort"
            assert [type(message).__name__ for message in sent] == ["Add", "Abort"]

            sent.clear()
            stream = client.generate(request("finisher", [1], 1))
            await anext(stream)  # its only output
            await stream.aclose()
            client.abort("finisher")
            assert [type(message).__name__ for message in sent] == ["Add"]
            await until(lambda: is_idle(client.stats))
            assert not client._inlets

    asyncio.run(main())


def test_a_thousand_leavers_leave_nothing_behind():
    async def leave(client, name):
        stream = client.generate(request(name, [1, 2, 3], LONG, ignore_eos=True))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.0005)
        await stream.aclose()

    async def main():
        async with running(max_num_seqs=16, max_queued_requests=2000) as client:
            await until(lambda: client.ready)
            await asyncio.gather(*(leave(client, f"r{i}") for i in range(1000)))
            assert not client._inlets
            outputs = await collect(client, request("next", [5], 3, ignore_eos=True))
            assert outputs[-1].finish_reason == "length"
            await until(lambda: is_idle(client.stats))

    asyncio.run(main())


def test_a_full_queue_answers_at_once():
    async def main():
        async with running("slow", max_num_seqs=2, max_queued_requests=2) as client:
            await until(lambda: client.ready)
            runs = await asyncio.gather(
                *(collect(client, request(f"r{i}", [1], 5, ignore_eos=True)) for i in range(20))
            )
            assert [outputs[-1].overloaded for outputs in runs] == [False] * 4 + [True] * 16
            assert all(outputs[-1].finish_reason == "length" for outputs in runs[:4])

    asyncio.run(main())


def test_a_killed_engine_ends_every_stream():
    async def main():
        async with running("slow") as client:
            await until(lambda: client.ready)
            tasks = [
                asyncio.create_task(collect(client, request(f"r{i}", [1], LONG, ignore_eos=True))) for i in range(5)
            ]
            await until(lambda: client.stats is not None and client.stats.num_running == 5)
            os.kill(client.pid, signal.SIGKILL)
            for outputs in await asyncio.gather(*tasks):
                assert outputs[-1].finish_reason == "error"
                assert outputs[-1].error_param is None
            assert "signal 9" in client.failure
            assert not client.alive
            after = await collect(client, request("late", [1]))
            assert (after[0].finish_reason, after[0].overloaded) == ("error", False)

    asyncio.run(main())


@rows(
    "model, reason, is_setting",
    ("misset", "num_pages is 0: it must be at least 1", True),
    ("missing", "model is missing: no such folder", False),
    ("bug", "RuntimeError: a bug", False),
)
def test_a_failed_start_says_why(model, reason, is_setting):
    async def main():
        async with running(model) as client:
            await until(lambda: client.failure)
            assert (client.failure, client.has_wrong_setting) == (reason, is_setting)
            assert not client.ready
            assert not client.alive

    asyncio.run(main())


def test_a_module_that_does_not_run_is_a_failure_too():
    async def main():
        client = EngineClient(EngineConfig(model=Path("fake")), worker_module="tests.engine.no_such_module")
        await client.start()
        await until(lambda: client.failure)
        assert "ended with status 1" in client.failure
        await client.close()

    asyncio.run(main())


def test_a_lost_device_ends_the_engine_with_its_reason():
    async def main():
        async with running("device-loss") as client:
            await until(lambda: client.ready)
            outputs = await collect(client, request("a", [66]))
            assert outputs[-1].finish_reason == "error"
            assert "fell off the bus" in client.failure

    asyncio.run(main())


def test_a_hanging_step_grows_old_while_beats_go_on():
    async def main():
        async with running("hang") as client:
            await until(lambda: client.ready)
            await until(lambda: client.stats is not None)
            task = asyncio.create_task(collect(client, request("a", [66])))
            await until(lambda: client.stats.num_running == 1)  # a beat sent from inside the hanging step
            await until(lambda: client.heartbeat_age_s > 1.0)
            assert client.alive
            os.kill(client.pid, signal.SIGKILL)
            assert (await task)[-1].finish_reason == "error"

    asyncio.run(main())


def test_close_while_loading_and_twice_and_unstarted():
    async def main():
        async with running("loading") as client:
            await until(lambda: client.heartbeat_age_s < 0.2)
            await client.close()
            await client.close()
        await EngineClient(EngineConfig(model=Path("fake"))).close()

    asyncio.run(main())


PARENT = """
    import asyncio, sys
    from pathlib import Path
    from engine.client import EngineClient
    from engine.config import EngineConfig

    async def main():
        client = EngineClient(EngineConfig(model=Path("fake"), device="cpu"), worker_module="tests.engine.fake_worker")
        await client.start()
        while not client.ready:
            await asyncio.sleep(0.01)
        print(client.pid, "torch" in sys.modules, flush=True)
        await asyncio.sleep(3600)

    print("main module runs", flush=True)
    asyncio.run(main())
"""


def test_the_engine_dies_with_its_parent_and_never_runs_its_main_module(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))  # no main guard: a spawned copy of it would start another engine
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    ) as parent:
        assert parent.stdout.readline() == "main module runs\n"
        pid, has_torch = parent.stdout.readline().split()
        assert has_torch == "False"
        os.kill(int(pid), signal.SIGINT)  # what a terminal would send with Ctrl-C: ignored
        parent.kill()
        end = time.monotonic() + DEADLINE_S
        while _exists(int(pid)):
            assert time.monotonic() < end, "the engine outlives its parent"
            time.sleep(0.01)
        assert parent.stdout.read() == ""
        assert "Traceback" not in parent.stderr.read()


def _exists(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


@rows("is_own", True, False)
def test_sockets_take_connections_of_their_own_user_only_g08(monkeypatch, is_own):
    """Names in the abstract namespace have no permissions, and every user can list them."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user if is_own else user + 1)
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver, context.socket(zmq.PUSH) as sender:
        sender.linger = 0
        address = new_address()
        bind(receiver, address)
        sender.connect(address)
        sender.send(b"x")
        assert bool(receiver.poll(10_000 if is_own else 300)) == is_own


def test_close_at_once_kills_an_engine_that_does_not_listen_g85():
    async def main():
        async with running("hang") as client:
            await until(lambda: client.ready)
            task = asyncio.create_task(collect(client, request("a", [66])))
            await until(lambda: client.stats is not None and client.stats.num_running == 1)
            await client.close(at_once=True)
            assert client.was_killed
            assert (await task)[-1].finish_reason == "error"
        async with running() as client:
            await until(lambda: client.ready)
            await client.close()
            assert not client.was_killed

    asyncio.run(main())
