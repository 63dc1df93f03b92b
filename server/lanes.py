"""`Lanes`: the threads that parse and tokenize request bodies. Small bodies never wait for large ones.

A call into pydantic or orjson holds the interpreter's lock until it returns, so threads alone do not keep the service
responsive: the cost of a call is bounded beforehand (`server.body`, the limits of `server.schema`).
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

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


class Lane:
    """Threads with a queue. If a client leaves before its work has begun, the work is dropped."""

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
        self._num_present = 0
        self._count = count or (lambda num_present: num_present)
        self._turn = turn or nullcontext()
        self._after_work = after_work
        self._tidying: asyncio.TimerHandle | None = None

    async def run(
        self, receive: Receive, work: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        """Run `work(*args, **kwargs)` in a thread and return its result. Read the request body first.

        Raises:
            TooManyRequests: `max_waiting` calls wait already.
            ClientDisconnect: the client left first.
        """
        num_present = self._change_present(1)
        if self._max_waiting is not None and num_present > self._num_threads + self._max_waiting:
            self._change_present(-1)
            raise TooManyRequests(f"{self._max_waiting} large requests wait to be read: try again later")
        try:
            return await while_connected(receive, self._in_thread(lambda: work(*args, **kwargs)))
        finally:
            self._change_present(-1)
            if self._after_work is not None and self._tidying is None:  # not now: an error still holds the parsed body
                self._tidying = asyncio.get_running_loop().call_later(_TIDY_DELAY_S, self._tidy, self._after_work)

    def _tidy(self, after_work: Callable[[], None]) -> None:
        self._tidying = None
        self._threads.submit(after_work)

    def _change_present(self, difference: int) -> int:
        self._num_present += difference
        return self._count(self._num_present)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        is_left = threading.Event()

        def work_in_turn() -> Result:
            with self._turn:
                if is_left.is_set():  # while the thread waited for its turn
                    raise ClientDisconnect
                return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work_in_turn)
        finally:
            is_left.set()


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
