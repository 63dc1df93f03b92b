"""Several rank processes under one client, around a scripted model: requests, aborts, idling, deaths."""

import asyncio
import contextlib
import os
import re
import time
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.rank_client import RankedEngineClient
from tests.engine.fake_rank_worker import POISON
from tests.engine.fakes import FakeModel, fake_core
from tests.engine.requests import request, run_all, tokens_of
from tests.engine.test_client import collect, is_idle, until

LAYOUTS = {"tp2": (2, 1), "dp2": (1, 2), "tp2-dp2": (2, 2)}
SMALL = {"page_size": 4, "num_pages": 256, "max_num_seqs": 8, "max_num_batched_tokens": 16}


@contextlib.asynccontextmanager
async def running(model="fine", tp=2, dp=1, **settings):
    config = EngineConfig(
        model=Path(model), device="cpu", tensor_parallel_size=tp, data_parallel_size=dp, expert_parallel_size=tp * dp,
        **SMALL | settings,
    )  # fmt: skip
    client = RankedEngineClient(config, worker_module="tests.engine.fake_rank_worker")
    await client.start()
    pids = client.pids
    try:
        yield client
    finally:
        await client.close()
    assert not [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]


def expected(requests):
    """What one rank answers."""
    core = fake_core(WithoutPoison(), num_pages=256)
    return {name: tokens_of(outputs) for name, outputs in run_all(core, requests).items()}


class WithoutPoison(FakeModel):
    """The model of the rank processes, on one rank."""

    def __call__(self, batch, plan, kv):
        logits_RV = super().__call__(batch, plan, kv)
        logits_RV[:, POISON] = -1.0
        return logits_RV


@pytest.mark.parametrize(
    ("layout", "overlap"),
    [
        pytest.param(layout, overlap, marks=[] if (layout, overlap) == ("tp2", True) else [pytest.mark.ranks])
        for layout in LAYOUTS
        for overlap in (False, True)
    ],
)
def test_answers_are_those_of_one_rank(layout, overlap):
    requests = [request(f"r{i}", range(i, i + 3 + 5 * i), 12, ignore_eos=i % 2 == 0) for i in range(1, 13)]

    async def main():
        async with running("fine", *LAYOUTS[layout], overlap=overlap) as client:
            await until(lambda: client.ready or client.failure)
            assert client.failure is None
            for _ in range(2):
                runs = await asyncio.gather(*(collect(client, each) for each in requests))
                assert {outputs[0].request_id: tokens_of(outputs) for outputs in runs} == expected(requests)
            await until(lambda: is_idle(client.stats))
        assert client.failure is None
        assert not client.was_killed

    asyncio.run(main())


@pytest.mark.ranks
def test_ranks_that_follow_write_profiles_too(tmp_path):
    async def main():
        async with running(tp=2, dp=2, profile_dir=tmp_path) as client:
            await until(lambda: client.ready or client.failure)
            await client.order("start_profile")
            await collect(client, request("r", [1, 2, 3], 12, ignore_eos=True))
            await client.order("stop_profile")
            await until(lambda: len(list(tmp_path.glob("*.json.gz"))) == 4)

    asyncio.run(main())
    assert {re.search("rank[0-3]", file.name).group() for file in tmp_path.iterdir()} == {f"rank{n}" for n in range(4)}


async def submit_poison(client, rank):
    """A request that carries POISON to a scheduler, and others that run meanwhile; their outputs and the seconds."""
    others = [asyncio.create_task(collect(client, request(f"o{i}", [1, i], 400, ignore_eos=True))) for i in range(4)]
    await until(lambda: client.stats is not None and client.stats.num_running >= 4)
    start_s = time.monotonic()
    poison = asyncio.create_task(collect(client, request("p", [POISON], 400, ignore_eos=True)))
    runs = await asyncio.gather(poison, *others)
    return runs, time.monotonic() - start_s


FAULTS = [
    ("kill", 0, "was killed by signal 9"),
    ("kill", 1, "was killed by signal 9"),
    ("stop", 0, "rank 0 has sent no heartbeat"),
    ("stop", 1, "rank 1 has sent no heartbeat"),
    ("raise", 0, "rank 0: RuntimeError: the device fell off the bus"),
    ("raise", 1, "rank 1: RuntimeError: the device fell off the bus"),
    ("memory", 1, "rank 1: a step of .* tokens ran out of memory"),
    ("exit", 1, "rank 1 ended with status 0"),
]


@pytest.mark.parametrize(
    ("layout", "fault", "rank", "reason"),
    [
        pytest.param(layout, *case, marks=[] if (layout, *case[:2]) == ("dp2", "kill", 1) else [pytest.mark.ranks])
        for layout in ("tp2", "dp2")
        for case in FAULTS
    ],
)
def test_a_rank_that_dies_ends_everything_within_five_seconds(layout, fault, rank, reason):
    tp, dp = LAYOUTS[layout]

    async def main():
        async with running(f"{fault}-{rank}", tp, dp) as client:
            await until(lambda: client.ready)
            pids = client.pids
            if dp > 1:  # the scheduler that has the fault gets the token
                client._router.choose = lambda item: rank if item.request_id == "p" else int(item.request_id[1]) % 2
                client._router.find = lambda name: rank
            runs, took_s = await submit_poison(client, rank)
            assert took_s < 5
            assert all(outputs[-1].finish_reason == "error" for outputs in runs)
            assert re.search(reason, client.failure), client.failure
            await until(lambda: not any(map(exists, pids.values())))
            print(f"{layout} {fault} of rank {rank}: told after {took_s:.1f} s: {client.failure}")

    asyncio.run(main())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("missing-1", "model is missing: no such folder"),
        ("missing-0", "model is missing: no such folder"),
        ("early-1", "the process of rank 1 was killed by signal 9"),
    ],
)
def test_a_rank_that_cannot_start_says_why_once(model, reason, capfd):
    async def main():
        async with running(model) as client:
            await until(lambda: client.failure)
            assert client.failure == reason
            assert not client.ready

    asyncio.run(main())
    errors = capfd.readouterr().err
    assert "Traceback" not in errors  # of ranks that only lost the one that failed
    assert reason not in errors  # who starts the client tells it


@pytest.mark.ranks
def test_a_slow_step_lives_and_a_hung_one_ends_the_engine():
    async def main(model, step_timeout):
        async with running(model, step_timeout=step_timeout) as client:
            await until(lambda: client.ready)
            outputs = await collect(client, request("p", [POISON], 2, ignore_eos=True))
            return outputs[-1].finish_reason, client.failure

    assert asyncio.run(main("slow-1", 30.0)) == ("length", None)
    reason, failure = asyncio.run(main("hang-1", 1.5))
    assert reason == "error"
    assert "has taken longer than step_timeout, 1.5 s" in failure


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixed_load_loses_nothing_and_frees_all_pages(layout):
    async def leave(client, item):
        stream = client.generate(item)
        for _ in range(3):
            await anext(stream)
        await stream.aclose()

    async def main():
        async with running("fine", *LAYOUTS[layout]) as client:
            await until(lambda: client.ready)
            items = [request(f"r{i}", range(1, 4 + i % 40), 3 + i % 9, ignore_eos=True) for i in range(64)]
            leavers = [request(f"l{i}", range(2, 30 + i), 300, ignore_eos=True) for i in range(16)]
            runs, _ = await asyncio.gather(
                asyncio.gather(*(collect(client, item) for item in items)),
                asyncio.gather(*(leave(client, item) for item in leavers)),
            )
            assert {outputs[0].request_id: tokens_of(outputs) for outputs in runs} == expected(items)
            await until(lambda: is_idle(client.stats))
            assert client._router.loads.num_tokens() == [0] * LAYOUTS[layout][1]
            assert client._router.loads.num_requests() == [0] * LAYOUTS[layout][1]
            pids = client.pids
            await asyncio.sleep(0.5)
            before_s = cpu_seconds(pids)
            await asyncio.sleep(2.0)
            assert cpu_seconds(pids) - before_s < 0.4  # of 2 s and all ranks: they wait, and do not spin

    asyncio.run(main())


def exists(pid):
    return Path(f"/proc/{pid}").exists()


def cpu_seconds(pids):
    """Seconds of CPU that the processes have used."""
    ticks = 0
    for pid in pids.values():
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
