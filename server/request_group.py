"""`RequestGroup`: runs the engine requests of one HTTP request as one stream, and aborts what is left when it ends."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

from engine.types import EngineInfo, EngineOutput, EngineRequest, EngineStats


class Engine(Protocol):
    """The part of `engine.client.EngineClient` that the server uses; tests pass their own."""

    @property
    def ready(self) -> bool:
        """Loaded, and requests are taken."""

    @property
    def alive(self) -> bool:
        """The process exists."""

    @property
    def failure(self) -> str | None:
        """Why the engine could not load, or died."""

    @property
    def info(self) -> EngineInfo | None:
        """Set once the engine is ready."""

    @property
    def stats(self) -> EngineStats | None:
        """The last snapshot."""

    @property
    def heartbeat_age_s(self) -> float:
        """Time since the last heartbeat."""

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Outputs of a request; closing the iterator before the last one aborts it."""


class RequestGroup:
    """`async with RequestGroup(...) as group: async for index, output in group: ...`

    `index` is the place of the request in the list. Leaving the block ends the requests that still run.
    """

    def __init__(self, engine: Engine, requests: Sequence[EngineRequest]) -> None:
        self._engine = engine
        self._requests = requests
        self._news: asyncio.Queue[tuple[int, EngineOutput | Exception]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._unfinished = set(range(len(requests)))

    async def __aenter__(self) -> "RequestGroup":
        """Start all requests."""
        self._tasks = [asyncio.create_task(self._follow(i, request)) for i, request in enumerate(self._requests)]
        return self

    async def __aexit__(self, *_exc: object) -> None:
        """End all requests; returns when the engine has been told."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def client(self) -> str:
        """Who sent them."""
        return self._requests[0].client

    @property
    def num_requests(self) -> int:
        """Requests of the group, whether they have ended or not."""
        return len(self._requests)

    @property
    def num_unfinished(self) -> int:
        """Requests that may still bring outputs."""
        return len(self._unfinished)

    def __aiter__(self) -> "RequestGroup":
        """The outputs of all requests, as they come."""
        return self

    async def __anext__(self) -> tuple[int, EngineOutput]:
        """The next output of any request that has not been stopped."""
        while self._unfinished:
            index, news = await self._news.get()
            if index not in self._unfinished:
                continue
            if isinstance(news, Exception):
                raise news
            if news.finish_reason is not None:
                self._unfinished.discard(index)
            return index, news
        raise StopAsyncIteration

    def stop(self, index: int) -> None:
        """End one request early; nothing more comes from it."""
        self._unfinished.discard(index)
        self._tasks[index].cancel()

    def fail(self, error: Exception) -> None:
        """Make whoever waits for outputs get this error instead, after those that are there already."""
        for index in self._unfinished:
            self._news.put_nowait((index, error))

    async def _follow(self, index: int, request: EngineRequest) -> None:
        try:
            async with aclosing(self._engine.generate(request)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    self._news.put_nowait((index, output))
                    if output.finish_reason is not None:
                        return
            raise RuntimeError(f"the engine's outputs for request {request.request_id} ended without a last one")
        except Exception as error:  # handed to the one who waits for the outputs
            self._news.put_nowait((index, error))
