"""Requests of one group end together: a failed or finished one leaves no sibling decoding (section G)."""

import asyncio

import pytest

from engine.types import EngineOutput
from server.request_group import RequestGroup
from tests.engine.requests import request


class EndlessEngine:
    """Gives a token whenever it is asked, for ever, but for request "fails"; knows who was closed before the end."""

    def __init__(self):
        self.aborted = []
        self.gate = asyncio.Event()

    async def generate(self, asked):
        is_over = False
        try:
            if asked.request_id == "fails":
                is_over = True
                yield EngineOutput(request_id="fails", finish_reason="error", error="broken")
                return
            while True:
                yield EngineOutput(request_id=asked.request_id, token_ids=[1])
                await self.gate.wait()
        finally:
            if not is_over:
                self.aborted.append(asked.request_id)


def run(use):
    async def main():
        engine = EndlessEngine()
        await asyncio.wait_for(use(engine), 10)
        return engine.aborted

    return asyncio.run(main())


def test_leaving_the_block_ends_every_request():
    async def use(engine):
        async with RequestGroup(engine, [request("a", [1]), request("b", [1])]) as running:
            await anext(running)

    assert sorted(run(use)) == ["a", "b"]


def test_an_error_inside_the_block_ends_the_siblings():
    async def use(engine):
        async def read():
            async with RequestGroup(engine, [request("a", [1]), request("fails", [1]), request("b", [1])]) as running:
                async for _, output in running:
                    if output.finish_reason == "error":
                        raise ValueError("of the reader")

        with pytest.raises(ValueError, match="of the reader"):
            await read()

    assert sorted(run(use)) == ["a", "b"]


def test_a_request_that_is_stopped_ends_alone():
    async def use(engine):
        async with RequestGroup(engine, [request("a", [1]), request("b", [1])]) as running:
            await anext(running)
            running.stop(0)
            while not engine.aborted:
                await asyncio.sleep(0)
            assert engine.aborted == ["a"]
            assert running.num_unfinished == 1

    assert sorted(run(use)) == ["a", "b"]


@pytest.mark.parametrize("stream", [False, True])
def test_when_one_choice_fails_the_others_are_aborted(service, stream):
    """Choice 1 fails in its first output; the others would decode for minutes."""
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
