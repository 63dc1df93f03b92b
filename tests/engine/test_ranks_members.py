"""Several HTTP processes' links at ranks that schedule for themselves: requests, limits, orders, who comes and goes."""

import asyncio
import contextlib

import msgspec
import pytest

from engine.loads import Loads
from engine.member import EngineMember
from engine.messages import Abort, Add, Join, Leave, Order, ToEngine
from engine.router import Router
from engine.senders import Senders
from engine.types import CallOff
from tests.engine.requests import request, tokens_of
from tests.engine.test_client import collect, is_idle, until
from tests.engine.test_ranks_processes import expected, running

LONG = 200


@contextlib.asynccontextmanager
async def members(*origins, **settings):
    """The client that starts two ranks, and links that have joined; all run in one event loop and share their loads."""
    async with running("paced-0", 1, 2, **settings) as client:
        numbers = [0] * 4 * len(origins)
        joined = [EngineMember(client.config, origin=each, loads=Loads(2, numbers, each - 1)) for each in origins]
        for member in joined:
            member.join(client.requests_address)
        try:
            await until(lambda: client.ready and all(each.ready and each.stats is not None for each in joined))
            yield client, joined
        finally:
            for member in joined:
                member.close()


def start(member, name, client="c", max_tokens=LONG, begun=None):
    """A request of its own connection; its outputs. `begun`: a set that gets its name with the first of them."""
    asked = msgspec.structs.replace(
        request(name, [1 + len(name)], max_tokens, ignore_eos=True), client=client, connection=name
    )

    async def outputs():
        heard = []
        async for output in member.generate(asked):
            heard.append(output)
            if begun is not None:
                begun.add(name)
        return heard

    return asyncio.create_task(outputs())


@pytest.mark.processes
def test_members_share_ranks_that_schedule():
    """Answers, even ranks, one answer to an order, one call, and the end of a member's requests on both ranks."""

    async def main():
        async with members(1, 2) as (client, (first, second)):
            assert first.info == second.info == client.info
            items = [request(f"r{i}", range(i, i + 3 + 5 * i), 12, ignore_eos=i % 2 == 0) for i in range(1, 9)]
            runs = await asyncio.gather(*(collect((first, second)[i % 2], each) for i, each in enumerate(items)))
            assert {outputs[0].request_id: tokens_of(outputs) for outputs in runs} == expected(items)
            for member in (first, second):
                await member.order("reset_prefix_cache")
            calls = []
            for member in (first, second):
                member.on_call_off(calls.append)
            call = CallOff(names=["a"], owner=None)
            first.call_off(call)
            tasks = [start((first, second)[i % 2], f"l{i}") for i in range(8)]
            await until(lambda: second.stats.num_running == first.stats.num_running == 8)
            assert first._router.loads.num_requests() == [4, 4]
            # beats come from a thread of their own and may be here before what the step loop tells
            await until(lambda: first.num_by_client == second.num_by_client == {"c": 8})
            assert first._router.held == [{"c": 4}, {"c": 4}]
            await until(lambda: calls == [call, call])
            freed = []
            second.on_freed = freed.append
            client.send_leave(1)
            await until(lambda: client.stats.num_running == 4 and second.num_by_client == {"c": 4})
            assert sum(freed) == 4
            for task in tasks[1::2]:
                assert (await task)[-1].finish_reason == "length"
            await until(lambda: is_idle(client.stats))
            first.fail("its process is gone")
            await asyncio.gather(*tasks)
            assert first._router.loads.num_requests() == [0, 0]

    asyncio.run(main())


@pytest.mark.ranks
def test_places_and_shares_hold_for_all_members_and_ranks():
    async def main():
        async with members(1, 2, max_queued_requests=0, max_num_seqs=2) as (client, (first, second)):
            assert first.info.max_requests == client.info.max_requests == 4
            begun = set()
            burst = [
                start(member, f"b{i}", "burst", begun=begun) for i, member in enumerate((first, first, first, second))
            ]
            await until(lambda: second.num_by_client == {"burst": 4})
            [refusal] = await start(first, "b4", "burst")
            assert refusal.overloaded
            assert "4 requests" in refusal.error
            await until(lambda: len(begun) == 4)
            [refusal] = await start(second, "n", "new")  # within its share, but all answers have begun
            assert refusal.overloaded
            for task in burst:
                task.cancel()
            await asyncio.gather(*burst, return_exceptions=True)
            await until(lambda: is_idle(client.stats) and not second.num_by_client)
            assert (await start(second, "late", "new", 3))[-1].finish_reason == "length"
            assert first._router.loads.num_requests() == first._router.loads.num_tokens() == [0, 0]

    asyncio.run(main())


class Socket:
    """Stands for a socket to a scheduler, and for what makes it."""

    def __init__(self):
        self.sent = []

    def socket(self, _kind):
        self.sent.append(Socket())
        return self.sent[-1]

    def set_hwm(self, _number):
        pass

    def setsockopt(self, _option, _value):
        pass

    def connect(self, address):
        self.address = address

    def send(self, frame, _flags):
        self.sent.append(msgspec.msgpack.decode(frame, type=ToEngine))


def test_messages_go_to_who_has_to_know_them():
    """A request and its end to one scheduler, what the first one passes on to the first, an order to all."""
    context = Socket()
    senders = Senders(context, Router(2, max_running=8, max_requests=8))
    for scheduler, address in ((0, "first"), (1, "second"), (0, "again")):
        senders.connect(scheduler, address)
    assert [each.address for each in context.sent] == ["first", "second"]
    adds = [Add(request(name, [1])) for name in "ab"]
    to_first = [Join(1, "x"), Leave(2), CallOff(names=None, owner=None)]
    order = Order("reset_prefix_cache", 1)
    for message in (*adds, *to_first, Abort("b"), Abort("unknown"), order):
        senders.send(message)
    assert [each.sent for each in context.sent] == [[adds[0], *to_first, order], [adds[1], Abort("b"), order]]
