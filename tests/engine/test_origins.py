"""Several processes send requests to one engine: outputs go where they belong, and places are shared by all."""

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.member import EngineMember
from engine.messages import Add, FromEngine, Held, Join, Outputs, Ready
from engine.origins import Origins
from engine.types import EngineOutput, TokenLogprobs
from tests.engine.fake_worker import INFO
from tests.engine.requests import request, tokens_of
from tests.engine.test_client import LONG, collect, until
from tests.tables import rows

DECODER = msgspec.msgpack.Decoder(FromEngine)


class Socket:
    def __init__(self):
        self.messages = []
        self.is_closed = False

    def send(self, frame):
        self.messages.append(DECODER.decode(frame))

    def close(self, linger):
        self.is_closed = True

    def take(self, kind):
        """What has come of a kind since the last call; the rest is dropped."""
        found = [message for message in self.messages if isinstance(message, kind)]
        self.messages.clear()
        return found


class Core:
    def __init__(self):
        self.added, self.aborted = [], []

    def add(self, request):
        self.added.append(request.request_id)

    def abort(self, request_id):
        self.aborted.append(request_id)


class Engine:
    """Three processes at an engine with `num_places` places: the founder is 0, and 1 and 2 have joined."""

    def __init__(self, num_places=4):
        self.sockets = {}
        self.core = Core()
        self.origins = Origins(lambda name: self.sockets.setdefault(name, Socket()), "0", num_places)
        for origin in (1, 2):
            self.origins.join(Join(origin, str(origin)), Ready(INFO))

    def add(self, origin, name, client="c"):
        asked = msgspec.structs.replace(request(name, [1]), client=client, connection=name)
        self.origins.add(self.core, Add(asked, origin))

    def outputs(self, origin):
        return [output for message in self.sockets[str(origin)].take(Outputs) for output in message.outputs]


def token(name, **fields):
    return EngineOutput(request_id=name, token_ids=[7], **fields)


def tokens(*names, others=()):
    """The message of a step in which these requests got a token."""
    return Outputs(list(others), msgspec.msgpack.encode(names), [7] * len(names))


def test_a_founder_alone_gets_a_step_in_one_message_and_keeps_its_own_places():
    socket = Socket()
    origins, core = Origins(lambda _name: socket, "0", 1), Core()
    for name in ("a", "b"):
        origins.add(core, Add(request(name, [1])))
    origins.send_outputs([])
    origins.send_outputs([token("a"), token("b")])
    assert core.added == ["a", "b"]
    assert socket.messages == [tokens("a", "b")]


def test_outputs_of_a_step_come_in_one_message_a_process():
    engine = Engine()
    assert [type(message) for message in engine.sockets["1"].messages] == [Ready, Held]
    for origin, name in ((1, "a"), (2, "b"), (1, "c")):
        engine.add(origin, name)
    for socket in engine.sockets.values():
        socket.messages.clear()
    engine.origins.send_outputs([token("a"), token("b"), token("c")])
    assert engine.sockets["1"].take(Outputs) == [tokens("a", "c")]
    assert engine.sockets["2"].take(Outputs) == [tokens("b")]
    assert engine.sockets["0"].messages == []


@rows(
    "output",
    token("b", finish_reason="length"),
    token("b", queue_s=0.5, prefill_s=0.25),
    token("b", num_cached_tokens=16),
    token("b", logprobs=[TokenLogprobs(7, -0.5, [])]),
    token("b", prompt_logprobs=[None]),
    EngineOutput(request_id="b", token_ids=[7, 8]),
    EngineOutput(request_id="b", finish_reason="abort"),
)
def test_an_output_that_is_more_than_a_token_is_sent_whole(output):
    socket = Socket()
    Origins(lambda _name: socket, "0", 3).send_outputs([token("a"), output, token("c")])
    assert socket.messages == [tokens("a", "c", others=[output])]


def test_two_outputs_of_one_request_in_a_step_keep_their_order():
    socket = Socket()
    outputs = [token("a", queue_s=0.5, prefill_s=0.25), token("a"), token("b")]
    Origins(lambda _name: socket, "0", 2).send_outputs(outputs)
    assert socket.messages == [Outputs(outputs)]


def test_who_holds_places_is_told_to_all_when_it_changes():
    engine = Engine()
    engine.add(1, "a", "x")
    engine.add(2, "b", "y")
    engine.origins.send_outputs([])
    assert engine.sockets["2"].take(Held)[-1] == Held({"x": 1, "y": 1}, 0)
    engine.origins.send_outputs([token("a")])
    assert engine.sockets["1"].take(Held)[1:] == [Held({"x": 1, "y": 1}, 0)]
    engine.origins.send_outputs([token("a", finish_reason="stop")])
    assert engine.sockets["1"].take(Held) == engine.sockets["2"].take(Held) == [Held({"y": 1}, 1)]
    assert engine.sockets["0"].messages == []


def test_the_limit_and_the_shares_hold_for_all_processes_together():
    """A burst through one process loses its youngest place to a client of another, and is told there."""
    engine = Engine(num_places=2)
    engine.add(1, "h0", "hog")
    engine.add(2, "h1", "hog")
    engine.add(1, "h2", "hog")
    assert [output.overloaded for output in engine.outputs(1)] == [True]
    engine.add(2, "n", "new")
    assert (engine.core.added, engine.core.aborted) == (["h0", "h1", "n"], ["h1"])
    engine.outputs(2)
    engine.origins.send_outputs([EngineOutput(request_id="h1", finish_reason="abort"), token("n")])
    [message] = engine.sockets["2"].take(Outputs)
    [loser] = message.outputs
    assert (loser.request_id, loser.finish_reason, loser.overloaded) == ("h1", "error", True)
    assert message == tokens("n", others=[loser])
    engine.add(1, "late", "third")  # three clients, two places: nobody has a share
    assert [output.request_id for output in engine.outputs(1)] == ["late"]


def test_an_abort_frees_the_place_before_the_next_step():
    engine = Engine(num_places=1)
    engine.add(1, "a")
    engine.origins.abort(engine.core, "a")
    engine.add(2, "b")
    assert engine.core.added == ["a", "b"]


def test_the_requests_of_a_process_that_is_gone_end():
    engine = Engine(num_places=2)
    engine.add(1, "a")
    engine.add(2, "b")
    engine.origins.leave(engine.core, 1)
    assert engine.core.aborted == ["a"]
    assert engine.sockets["1"].is_closed
    assert engine.origins.addresses == ("0", "2")
    engine.add(1, "late")  # was on its way
    engine.origins.join(Join(1, "again"), Ready(INFO))
    assert engine.core.added == ["a", "b"]
    assert engine.origins.addresses == ("0", "2")
    engine.origins.send_outputs([EngineOutput(request_id="a", finish_reason="abort"), token("b")])
    assert engine.sockets["2"].take(Held)[-1].num_by_client == {"c": 1}
    assert not engine.sockets["0"].messages


def test_two_members_share_an_engine_process():
    """With its limit, its heartbeat, and its last word."""

    async def main():
        client = EngineClient(make_config(), worker_module="tests.engine.fake_worker")
        await client.start()
        async with joined(client, 1) as first, joined(client, 2) as second:
            await until(lambda: first.ready and second.ready and second.stats is not None)
            runs = await asyncio.gather(
                *(collect(member, request(f"m{i}", [i], 9, ignore_eos=True)) for i, member in ((3, first), (5, second)))
            )
            assert [tokens_of(outputs) for outputs in runs] == [[3] * 9, [5] * 9]
            tasks = [
                asyncio.create_task(collect(member, request(f"r{i}", [1], LONG, ignore_eos=True)))
                for i, member in enumerate((first, second, first, second))
            ]
            await until(lambda: client.stats is not None and client.stats.num_running == 4)
            refused = [await collect(member, request(f"late{member._origin}", [1])) for member in (first, second)]
            assert [[output.overloaded for output in outputs] for outputs in refused] == [[True], [True]]
            await until(lambda: sum(first.num_by_client.values()) == sum(second.num_by_client.values()) == 4)
            freed = []
            second.on_freed = freed.append
            client.send_leave(1)
            await until(lambda: sum(second.num_by_client.values()) == 2 and client.stats.num_running == 2)
            assert freed == [2]
            tasks[0].cancel(), tasks[2].cancel()
            await client.close()
            second.fail("gone")
            for task in (tasks[1], tasks[3]):
                assert (await task)[-1].finish_reason == "error"
            assert not second.alive

    asyncio.run(main())


@contextlib.asynccontextmanager
async def joined(client, origin):
    member = EngineMember(client.config, origin=origin)
    member.join(client.requests_address)
    try:
        yield member
    finally:
        member.close()


def make_config():
    return EngineConfig(model=Path("slow"), device="cpu", max_num_seqs=2, max_queued_requests=2)


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_message_to_all_leaves_out_who_is_gone(is_gone):
    engine = Engine()
    if is_gone:
        engine.origins.leave(engine.core, 2)
    engine.origins.broadcast(Ready(INFO))
    assert [type(message) for message in engine.sockets["0"].messages] == [Ready]
    assert len(engine.sockets["2"].take(Ready)) == (1 if is_gone else 2)
