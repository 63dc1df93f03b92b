"""Requests of one group end together: a failed or finished one leaves no sibling decoding (section G)."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from engine.types import EngineOutput
from server import respond
from server.request_group import RequestGroup
from tests.engine.requests import request
from tests.tables import rows


class EndlessEngine:
    """Gives a token at once, and then waits for ever, but for request "fails"; knows who was dropped before the end."""

    def __init__(self):
        self.aborted = []
        self.inlets = {}

    def submit(self, asked, inlet):
        if asked.request_id == "fails":
            inlet.put(EngineOutput(request_id="fails", finish_reason="error", error="broken"))
            return
        self.inlets[asked.request_id] = inlet
        inlet.put(token_of(asked.request_id))

    def drop(self, request_id):
        if self.inlets.pop(request_id, None) is not None:
            self.aborted.append(request_id)


class Taker:
    """Takes by `take`; a token too, since it is an output like any other."""

    def __init__(self, take):
        self.take = take

    def take_token(self, token_id, now_s):
        return self.take(EngineOutput(request_id="a", token_ids=[token_id]))


def token_of(request_id, finish_reason=None):
    return EngineOutput(request_id=request_id, token_ids=[1], finish_reason=finish_reason)


def run(use):
    async def main():
        engine = EndlessEngine()
        await asyncio.wait_for(use(engine), 10)
        return engine.aborted

    return asyncio.run(main())


def test_leaving_the_block_ends_every_request():
    async def use(engine):
        with RequestGroup(engine, [request("a", [1]), request("b", [1])]) as running:
            await running.take()

    assert sorted(run(use)) == ["a", "b"]


def test_an_error_inside_the_block_ends_the_siblings():
    async def use(engine):
        async def read():
            with RequestGroup(engine, [request("a", [1]), request("fails", [1]), request("b", [1])]) as running:
                while news := await running.take():
                    if any(output.finish_reason == "error" for _, output in news):
                        raise ValueError("of the reader")

        with pytest.raises(ValueError, match="of the reader"):
            await read()

    assert sorted(run(use)) == ["a", "b"]


def test_a_request_that_is_stopped_ends_alone():
    async def use(engine):
        with RequestGroup(engine, [request("a", [1]), request("b", [1])]) as running:
            running.stop(0)
            assert engine.aborted == ["a"]
            assert running.num_unfinished == 1
            assert [index for index, _ in await running.take()] == [1]

    assert sorted(run(use)) == ["a", "b"]


def test_outputs_that_came_meanwhile_are_taken_together_and_in_order():
    async def use(engine):
        with RequestGroup(engine, [request("a", [1]), request("b", [1])]) as running:
            engine.inlets["b"].put(token_of("b"))
            engine.inlets["a"].put(token_of("a", "stop"))
            news = await running.take()
            assert [(index, output.finish_reason) for index, output in news] == [
                (0, None),
                (1, None),
                (1, None),
                (0, "stop"),
            ]
            waiting = asyncio.create_task(running.take())
            await asyncio.sleep(0)
            assert not waiting.done()
            engine.inlets["b"].put(token_of("b", "length"))
            assert [index for index, _ in await waiting] == [1]
            assert await running.take() == []

    assert run(use) == []  # both are over: there is nothing to end


def test_an_error_given_from_outside_comes_after_the_outputs_that_are_there():
    async def use(engine):
        with RequestGroup(engine, [request("a", [1])]) as running:
            running.fail(ValueError("cut"))
            assert len(await running.take()) == 1
            with pytest.raises(ValueError, match="cut"):
                await running.take()
        with RequestGroup(engine, [request("b", [1])]) as running:
            await running.take()
            waiting = asyncio.create_task(running.take())
            await asyncio.sleep(0)
            running.fail(ValueError("cut"))
            with pytest.raises(ValueError, match="cut"):
                await waiting

    assert run(use) == ["a", "b"]


@rows("is_token", False, True)
def test_only_outputs_that_are_waited_for_are_taken_without_waking_the_reader(is_token):
    def put(inlet):
        if is_token:
            inlet.put_token("a", 1, 0.0)
        else:
            inlet.put(token_of("a"))

    async def use(engine):
        taken = []
        with RequestGroup(engine, [request("a", [1])]) as running:
            running.taker = Taker(lambda output: output.finish_reason is None and not taken.append(output))
            put(engine.inlets["a"])
            assert len(await running.take()) == 2
            assert not taken  # the reader had not asked yet
            waiting = asyncio.create_task(running.take())
            await asyncio.sleep(0)
            put(engine.inlets["a"])
            await asyncio.sleep(0)
            assert (len(taken), waiting.done()) == (1, False)
            engine.inlets["a"].put(token_of("a", "stop"))
            assert [output.finish_reason for _, output in await waiting] == ["stop"]

    assert run(use) == []


def test_an_output_taken_as_the_wait_times_out_is_written_before_the_next_one(monkeypatch):
    """The loop is late, so that the time is up and both outputs come in one turn of it."""
    monkeypatch.setattr(respond, "KEEP_ALIVE_S", 0.01)
    order = []

    async def use(engine):
        loop = asyncio.get_running_loop()

        def write_soon(output):  # as `server.protocol.WrittenTogether` does
            if output.finish_reason is None:
                loop.call_soon(order.append, "token")
            return output.finish_reason is None

        def deliver():
            engine.inlets["a"].put(token_of("a"))
            engine.inlets["a"].put(token_of("a", "stop"))

        async def read(answer):
            order.extend(output.finish_reason for _, output in await respond._next_news(answer, None))

        with RequestGroup(engine, [request("a", [1])]) as running:
            await running.take()
            running.taker = Taker(write_soon)
            reading = asyncio.create_task(read(SimpleNamespace(group=running, watch=SimpleNamespace(silence_s=0))))
            await asyncio.sleep(0)
            loop.call_later(0.02, deliver)
            time.sleep(0.05)
            await reading

    run(use)
    assert order == ["token", "stop"]


def test_an_error_while_taking_an_output_reaches_the_reader():
    def fail(_output):
        raise ValueError("of the taker")

    async def use(engine):
        with RequestGroup(engine, [request("a", [1])]) as running:
            await running.take()
            running.taker = Taker(fail)
            waiting = asyncio.create_task(running.take())
            await asyncio.sleep(0)
            engine.inlets["a"].put(token_of("a"))
            with pytest.raises(ValueError, match="of the taker"):
                await waiting

    assert run(use) == ["a"]


def test_a_reader_that_waits_learns_that_the_last_request_was_stopped():
    async def use(engine):
        with RequestGroup(engine, [request("a", [1])]) as running:
            await running.take()
            waiting = asyncio.create_task(running.take())
            await asyncio.sleep(0)
            running.stop(0)
            assert await waiting == []

    assert run(use) == ["a"]


@rows("stream", False, True)
def test_when_one_choice_fails_the_others_are_aborted(service, stream):
    """Choice 1 fails in its first output; the others would decode for minutes."""
    service.engine.forget()
    service.engine.script = lambda asked: [[5]] * (1 if asked.request_id.endswith("-1") else 10_000)
    service.engine.delay_s = 0.02
    service.engine.last = lambda asked, _count: (
        {"finish_reason": "error", "error": "broken"} if asked.request_id.endswith("-1") else {}
    )
    with service.http() as http:
        response = http.post("/v1/completions", json={"prompt": "a", "n": 3, "max_tokens": 3000, "stream": stream})
    assert "broken" in response.text
    ended = [name.rpartition("-")[2] for name in service.engine.aborted]
    assert sorted(ended) == ["0", "2"]
    assert not service.engine.running
