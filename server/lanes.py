"""`Lanes`: the threads that parse and tokenize request bodies. Small bodies never wait for large ones.

A call into pydantic or orjson holds the interpreter's lock until it returns, so threads alone do not keep the service
responsive: the cost of a call is bounded beforehand (`server.body`, the limits of `server.schema`).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from starlette.types import Receive

from server.connection import while_connected
from server.errors import TooManyRequests
from server.memory import give_back_memory

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
        after_work: Callable[[], None] | None = None,
    ) -> None:
        """`max_waiting` is how many calls may wait; None for any number.

        `after_work` runs in a thread one second after a call ends, once for all calls that end meanwhile.
        """
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._num_present = 0
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
        if self._max_waiting is not None and self._num_present >= self._num_threads + self._max_waiting:
            raise TooManyRequests(f"{self._max_waiting} large requests wait to be read: try again later")
        self._num_present += 1
        try:
            return await while_connected(receive, self._in_thread(lambda: work(*args, **kwargs)))
        finally:
            self._num_present -= 1
            if self._after_work is not None and self._tidying is None:  # not now: an error still holds the parsed body
                self._tidying = asyncio.get_running_loop().call_later(_TIDY_DELAY_S, self._tidy, self._after_work)

    def _tidy(self, after_work: Callable[[], None]) -> None:
        self._tidying = None
        self._threads.submit(after_work)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class Lanes:
    """One lane for small bodies, one for large ones."""

    def __init__(self) -> None:
        self._small = Lane("small-body", num_threads=_NUM_SMALL_THREADS)
        self._large = Lane(
            "large-body", num_threads=_NUM_LARGE_THREADS, max_waiting=MAX_WAITING_LARGE, after_work=give_back_memory
        )

    def of(self, num_bytes: int) -> Lane:
        """The lane of a body of this size."""
        return self._large if num_bytes > LARGE_BODY_BYTES else self._small
