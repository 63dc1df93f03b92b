"""Orders to the engine: an empty prefix cache, and traces of its steps; what every process is told to call off."""

import asyncio
import gzip
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import OrderError
from engine.messages import Obeyed
from engine.pages import PageAllocator
from engine.prefix_cache import PrefixCache
from engine.rank_client import RankedEngineClient
from engine.step_profile import StepProfile
from engine.types import CallOff
from tests.engine.fake_worker import INFO
from tests.engine.fakes import FakeModel, fake_core, in_both_orders
from tests.engine.requests import request, run_all, tokens_of
from tests.engine.test_client import DEADLINE_S, running, until
from tests.engine.windowed import WindowedModel
from tests.tables import rows


def test_a_cleared_cache_keeps_pages_in_use_and_frees_idle_ones():
    pages = PageAllocator(4)
    cache = PrefixCache(pages)
    in_use, idle = pages.allocate(2)
    cache.remember(b"a", in_use)
    cache.remember(b"b", idle)
    pages.release([idle])
    cache.clear()
    assert (len(cache), cache.match([b"a"]), cache.match([b"b"])) == (0, [], [])
    assert (pages.num_used, pages.num_available) == (1, 3)
    pages.release([in_use])
    assert sorted(pages.allocate(4)) == [0, 1, 2, 3], "none is told to be forgotten again"


@in_both_orders
def test_requests_go_on_while_prompts_are_forgotten(make_core):
    prompt = [5, 6, 7, 8] * 5
    core = make_core()
    expected = tokens_of(run_all(core, [request("first", prompt, 20, ignore_eos=True)])["first"])
    core.add(request("second", prompt, 20, ignore_eos=True))
    outputs = [output for _ in range(6) for output in core.step()]
    core.reset_prefix_cache()
    outputs += run_all(core)["second"]
    assert tokens_of(outputs) == expected
    assert outputs[-1].num_cached_tokens > 0
    core.reset_prefix_cache()
    third = run_all(core, [request("third", prompt, 20, ignore_eos=True)])["third"]
    assert (tokens_of(third), third[-1].num_cached_tokens) == (expected, 0)
    assert core.stats().num_pages_used == 0


@rows("make_model", FakeModel, WindowedModel)
@rows("num_prompt", 1, 3, 9)
@rows("num_steps", 1, 2, 5, 9)
def test_nothing_of_a_running_request_is_reused_after_a_reset(make_model, num_prompt, num_steps):
    """A page that became full after the reset was found, with tokens from before; later ones lay idle, unfindable."""
    core = fake_core(make_model(eos_token_ids=()))
    cache = core._scheduler._paging._cache
    prompt = list(range(5, 5 + num_prompt))
    for turn in ("first", "second"):
        core.add(request(turn, prompt, 20))
        outputs = [output for _ in range(num_steps) for output in core.step()]
        core.reset_prefix_cache()
        outputs += run_all(core)[turn]
        assert len(cache) == 0
        answered = prompt + tokens_of(outputs)
        for name, num_cached in (("new", 0), ("later", 16)):
            [again] = run_all(core, [request(turn + name, answered[:18], 1)]).values()
            assert again[-1].num_cached_tokens == num_cached


def test_a_profile_is_a_trace_of_what_the_engine_ran(tmp_path):
    profile = StepProfile(tmp_path / "traces", rank=3)
    for wrong, then in ((profile.stop, profile.start), (profile.start, profile.stop)):
        with pytest.raises(OrderError, match="first"):
            wrong()
        then()
        torch.ones(3).cumsum(0)
    [file] = (tmp_path / "traces").iterdir()
    assert "rank3" in file.name
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::cumsum" for event in events)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OrderError, match="cannot be made"):
        StepProfile(tmp_path / "file" / "traces", rank=0).start()
    with pytest.raises(OrderError, match="--profile-dir"):
        StepProfile(None, rank=0).start()


def test_orders_are_answered_and_calls_are_heard():
    async def main():
        async with running() as client:
            with pytest.raises(OrderError, match="loading"):
                await client.order("stop_profile")
            await until(lambda: client.ready)
            for kind, reason in (("start_profile", "--profile-dir"), ("stop_profile", "no profile")):
                with pytest.raises(OrderError, match=reason):
                    await asyncio.wait_for(client.order(kind), DEADLINE_S)
            heard = []
            client.on_call_off(heard.append)
            client.call_off(CallOff(names=["a"], owner="me"))
            await until(lambda: heard == [CallOff(names=["a"], owner="me")])
        with pytest.raises(OrderError, match="stopped"):
            await client.order("stop_profile")

    asyncio.run(main())


def test_an_order_ends_when_the_engine_does():
    async def main():
        async with running() as client:
            await until(lambda: client.ready)
            os.kill(client.pid, signal.SIGSTOP)
            order = asyncio.create_task(client.order("stop_profile"))
            await asyncio.sleep(0)
            client.fail("it hangs")
            os.kill(client.pid, signal.SIGCONT)
            with pytest.raises(OrderError, match="stopped"):
                await order

    asyncio.run(main())


def test_an_order_waits_for_every_rank_that_schedules(monkeypatch):
    """One that cannot is enough to fail it, whichever answers first."""
    client = RankedEngineClient(
        EngineConfig(model=Path("fake"), device="cpu", data_parallel_size=2, expert_parallel_size=2, num_pages=8),
        worker_module="unused",
    )
    client.info, client._is_open, sent = INFO, True, []
    monkeypatch.setattr(RankedEngineClient, "alive", True)
    monkeypatch.setattr(client, "_send", sent.append)

    async def main(*answers):
        order = asyncio.create_task(client.order("reset_prefix_cache"))
        for error in answers:
            await asyncio.sleep(0)
            assert not order.done()
            client._handle(Obeyed(sent[-1].number, error))
        await order

    asyncio.run(main(None, None))
    for answers in (("no", None), (None, "no")):
        with pytest.raises(OrderError, match="no"):
            asyncio.run(main(*answers))
