"""`RequestGroup`: runs the engine requests of one HTTP request together, and ends what is left when it is done."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from engine.inlet import Inlet, Taker
from engine.types import CallOff, EngineInfo, EngineOutput, EngineRequest, EngineStats, ExpertLoad, OrderKind
from loaders.phases import StartProgress


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
    def expert_load(self) -> ExpertLoad | None:
        """Tokens by expert, the last ones sent; None if they are not counted."""

    @property
    def start_progress(self) -> StartProgress | None:
        """How far the start is; None before the first message of the engine, and once it is ready."""

    @property
    def heartbeat_age_s(self) -> float:
        """Time since the last heartbeat."""

    def submit(self, request: EngineRequest, inlet: Inlet) -> None:
        """Start a request; `inlet` gets its outputs in the event loop, the last one with a finish reason."""

    def drop(self, request_id: str) -> None:
        """End a request: no output follows. Does nothing if it is over."""

    def call_off(self, call: CallOff) -> None:
        """Have every process that listens end these requests."""

    def on_call_off(self, hook: Callable[[CallOff], None]) -> None:
        """From now on `hook` hears, in the event loop, what any process calls off."""

    async def order(self, kind: OrderKind) -> None:
        """Have the engine do something other than answering. Raises OrderError."""


News = list[tuple[int, EngineOutput]]
"""Outputs with the place of their request in the group."""


class RequestGroup:
    """`with RequestGroup(...) as group: while news := await group.take(): ...`

    Leaving the block ends the requests that still run.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[EngineRequest], *, names: Collection[str] = (), owner: str = ""
    ) -> None:
        """`names` are those by which its client may call it off, `owner` is who may (`server.asker`)."""
        self.names = frozenset(names)
        self.owner = owner
        self._engine = engine
        self._requests = requests
        self._news: News = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._inlets = [Inlet(partial(self.add, index), self.fail) for index in range(len(requests))]
        self.taker: Taker | None = None
        """Asked first for an output that `take` waits for, in a group of one request; it saves waking the task."""
        self._unfinished = set(range(len(requests)))

    def __enter__(self) -> "RequestGroup":
        """Start all requests."""
        for inlet, request in zip(self._inlets, self._requests, strict=True):
            self._engine.submit(request, inlet)
        return self

    def __exit__(self, *_exc: object) -> None:
        """End all requests."""
        for index in list(self._unfinished):
            self.stop(index)
        self.taker = None  # else it and this object keep each other alive, and so do the inlets
        self._inlets = []

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

    async def take(self) -> News:
        """All outputs since the last call, of one engine step if the caller keeps up. Empty once all requests ended.

        Raises:
            Exception: the one given to `fail`.
        """
        while self._unfinished and not self._news:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            self._let_take(self.taker)
            try:
                await self._waiter
            finally:
                self._let_take(None)
        news, self._news = self._news, []
        return news

    def stop(self, index: int) -> None:
        """End one request early; nothing more comes from it."""
        self._unfinished.discard(index)
        self._news = [each for each in self._news if each[0] != index]
        self._engine.drop(self._requests[index].request_id)
        self._wake()  # whoever waits for outputs may have none to wait for any more

    def fail(self, error: Exception) -> None:
        """Make `take` raise this error once the outputs that are there already have been taken."""
        self._error = error
        self._wake()

    def add(self, index: int, output: EngineOutput) -> None:
        """Keep an output for `take`."""
        if output.finish_reason is not None:
            self._unfinished.discard(index)
        self._news.append((index, output))
        self._wake()

    def _let_take(self, taker: Taker | None) -> None:
        for inlet in self._inlets:
            inlet.taker = taker

    def _wake(self) -> None:
        self._let_take(None)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
