"""`Lanes`: the threads that parse and tokenize request bodies. Small bodies never wait for large ones.

A call into pydantic or orjson holds the interpreter's lock until it returns, so threads alone do not keep the service
responsive: the cost of a call is bounded beforehand (`server.body`, the limits of `server.schema`).
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from engine.admission import choose_loser
from server.connection import while_connected
from server.errors import TooManyRequests
from server.memory import give_back_memory
from server.tally import Gauge, Tally

LARGE_BODY_BYTES = 64 * 1024
"""Larger bodies go to the lane of large bodies; parsing one of this size takes a few milliseconds."""

MAX_WAITING_LARGE = 32

_NUM_SMALL_THREADS = 4
_TIDY_DELAY_S = 1.0
_NUM_LARGE_THREADS = 1  # one large body at a time: its Python objects take many times its own size

Params = ParamSpec("Params")
Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class _Call:
    """Work that waits or runs. `refused` is set when it loses its place to another client's."""

    client: str
    refused: asyncio.Future[None]
    running: "Future[Any] | None" = None

    @property
    def has_begun(self) -> bool:
        return self.running is not None and (self.running.running() or self.running.done())


class Lane:
    """Threads with a queue. If a client leaves, or the caller is cancelled, before the work has begun, it is dropped.

    Clients share the places of a bounded queue as they share the engine's (`engine.admission`): one client may fill
    them while nobody else comes, and then loses its youngest waiting call to a newcomer.
    """

    def __init__(
        self,
        name: str,
        *,
        num_threads: int,
        max_waiting: int | None = None,
        count: Callable[[int], int] | None = None,
        turn: AbstractContextManager[object] | None = None,
        after_work: Callable[[], None] | None = None,
    ) -> None:
        """`max_waiting` is how many calls may wait; None for any number.

        Processes may share a lane: `count`, given the number of calls present here, returns that in all of them, and
        `turn` is held during a call. `after_work` runs in a thread one second after a call ends, once for all calls
        that end meanwhile.
        """
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._calls: list[_Call] = []  # oldest first
        self._count = count or (lambda num_present: num_present)
        self._turn = turn or nullcontext()
        self._after_work = after_work
        self._tidying: asyncio.TimerHandle | None = None

    def for_client(self, client: str) -> "ClientLane":
        """This lane for the calls of one client."""
        return ClientLane(self, client)

    async def run(self, client: str, receive: Receive, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread and return its result; errors as `ClientLane.run` says."""
        call = _Call(client, asyncio.get_running_loop().create_future())
        if self._is_full_with(1) and not self._free_place(client):
            self._count(len(self._calls))
            raise self._too_many()
        self._calls.append(call)
        try:
            return await while_connected(receive, self._in_thread(call, work))
        finally:
            self._calls.remove(call)
            self._count(len(self._calls))
            call.refused.cancel()
            if self._after_work is not None and self._tidying is None:  # not now: an error still holds the parsed body
                self._tidying = asyncio.get_running_loop().call_later(_TIDY_DELAY_S, self._tidy, self._after_work)

    def _tidy(self, after_work: Callable[[], None]) -> None:
        self._tidying = None
        self._threads.submit(after_work)

    async def _in_thread(self, call: _Call, work: Callable[[], Result]) -> Result:
        is_left = threading.Event()

        def work_in_turn() -> Result:
            with self._turn:
                if is_left.is_set():  # while the thread waited for its turn
                    raise ClientDisconnect
                return work()

        call.running = running = self._threads.submit(work_in_turn)
        result = asyncio.wrap_future(running)
        try:
            await asyncio.wait((result, call.refused), return_when=asyncio.FIRST_COMPLETED)
            if call.refused.done():
                raise self._too_many()
            return await result
        finally:
            is_left.set()
            result.cancel()  # drops work that has not begun
            call.running = None
            del result, running  # else an error and this frame keep each other alive, and the parsed body with them

    def _is_full_with(self, num_more: int) -> bool:
        """Whether so many more calls are too many. They count from now on, also for other processes."""
        num_present = self._count(len(self._calls) + num_more)
        return self._max_waiting is not None and num_present > self._num_threads + self._max_waiting

    def _free_place(self, client: str) -> bool:
        """Take a place from another client's waiting call, if the newcomer holds less than its share."""
        loser = choose_loser([((call.client, ""), call.has_begun) for call in self._calls], client)
        if loser is None:
            return False
        call = self._calls[loser]
        if call.running is None or not call.running.cancel():  # it has begun this moment
            return False
        call.refused.set_result(None)
        return True

    def _too_many(self) -> TooManyRequests:
        error = TooManyRequests(f"{self._max_waiting} large requests wait to be read: try again later")
        error.what = "bodies"
        return error


class ClientLane:
    """A lane as one client sees it."""

    def __init__(self, lane: Lane, client: str) -> None:
        self.lane = lane
        self._client = client

    async def run(
        self, receive: Receive, work: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        """Run `work(*args, **kwargs)` in a thread and return its result. Read the request body first.

        Raises:
            TooManyRequests: `max_waiting` calls wait already, and the client holds its share, or another client's call
                took the place of this one.
            ClientDisconnect: the client left first.
        """
        return await self.lane.run(self._client, receive, lambda: work(*args, **kwargs))


class Lanes:
    """One lane for small bodies, and one for large ones, which the HTTP processes of a service share."""

    def __init__(self, tally: Tally, turn: AbstractContextManager[object] | None = None) -> None:
        """`turn` lets one process at a time read a large body; None if this is the only process."""
        self._tally = tally
        self._small = Lane("small-body", num_threads=_NUM_SMALL_THREADS)
        self._large = Lane(
            "large-body",
            num_threads=_NUM_LARGE_THREADS,
            max_waiting=MAX_WAITING_LARGE,
            count=self._count_large,
            turn=turn,
            after_work=give_back_memory,
        )

    def of(self, num_bytes: int) -> Lane:
        """The lane of a body of this size."""
        return self._large if num_bytes > LARGE_BODY_BYTES else self._small

    def _count_large(self, num_present: int) -> int:
        self._tally.set_gauge(Gauge.LARGE_BODIES, num_present)
        return self._tally.sum_gauge(Gauge.LARGE_BODIES)
