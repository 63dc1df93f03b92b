"""The load of one client process: closed-loop streams or random arrivals, one `Record` a request."""

import asyncio
import contextlib
import random
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from server.bench.config import BenchConfig
from server.bench.connection import Pool
from server.bench.errors import RequestFailed
from server.bench.events import AnswerReader, error_text
from server.bench.workload import PATHS, Accepted, Workload


@dataclass(slots=True)
class Record:
    """One request, in seconds of the monotonic clock, which all processes of a machine share.

    `start_s` is when the request was due: waiting because the client is late counts as the server's time.
    `error` is the kind of failure, None for a complete answer; `is_cut`: the run ended before the answer did.
    """

    start_s: float
    end_s: float = 0.0
    times: "array[float]" = field(default_factory=lambda: array("d"))  # of chunks with tokens
    counts: "array[int]" = field(default_factory=lambda: array("L"))  # tokens of each such chunk
    prompt_tokens: int | None = None
    output_tokens: int = 0
    counting: str = "chunks"
    error: str | None = None
    detail: str = ""
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """This process's part of the load: of all requests, every `num_processes`-th."""

    index: int
    num_processes: int

    def numbers(self, total: int | None) -> Iterator[int]:
        """Numbers of this process's requests, in order; endless without a total."""
        number = self.index
        while total is None or number < total:
            yield number
            number += self.num_processes

    def part_of(self, total: int) -> int:
        """How many of `total` things belong to this process."""
        return len(range(self.index, total, self.num_processes))


class Load:
    """Sends one process's requests. `on_end` is called after each."""

    def __init__(
        self, config: BenchConfig, accepted: Accepted, share: Share, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self._config = config
        self._share = share
        self._workload = Workload(config, accepted)
        self._path = config.target.path + PATHS[config.endpoint]
        self._pool = Pool(config.target, config.timeout_s)
        self._on_end = on_end
        self.records: list[Record] = []

    async def warm_up(self) -> None:
        """Send this process's warm-up requests, as many at a time as in the run; failures show in the run itself."""
        numbers = iter([-1 - number for number in self._share.numbers(self._config.warmup)])
        num_streams = self._num_streams() or 1
        await asyncio.gather(*(self._closed_loop(numbers) for _ in range(num_streams)))
        self.records.clear()

    async def run(self, start_s: float) -> None:
        """Send this process's requests from `start_s` on; after `seconds`, what still runs is cut."""
        await asyncio.sleep(max(0.0, start_s - time.monotonic()))
        seconds = self._config.seconds
        timeout = None if seconds is None else max(0.0, start_s + seconds - time.monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
                if self._config.request_rate is None:
                    numbers = self._share.numbers(self._config.num_requests)
                    for _ in range(self._num_streams()):
                        group.create_task(self._closed_loop(numbers, self._on_end))
                else:
                    await self._arrivals(group, start_s)

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def _num_streams(self) -> int:
        return self._share.part_of(self._config.concurrency or 0)

    async def _closed_loop(self, numbers: Iterator[int], on_end: Callable[[], None] = lambda: None) -> None:
        for number in numbers:
            body = self._workload.body(number)
            await self._send(body, time.monotonic())
            on_end()

    async def _arrivals(self, group: asyncio.TaskGroup, start_s: float) -> None:
        """Random arrivals: the sum of the processes' Poisson streams is one of the whole rate."""
        config, share = self._config, self._share
        draw = random.Random(f"{config.seed} arrivals {share.index}")
        rate = (config.request_rate or 0.0) / share.num_processes
        due_s = start_s
        for number in share.numbers(config.num_requests):
            due_s += draw.expovariate(rate)
            body = self._workload.body(number)  # made ahead, while there is time
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            group.create_task(self._arrive(body, due_s))

    async def _arrive(self, body: bytes, due_s: float) -> None:
        await self._send(body, due_s)
        self._on_end()

    async def _send(self, body: bytes, due_s: float) -> None:
        """One request, whatever becomes of it, as a record."""
        record, reader = Record(due_s), AnswerReader()
        self.records.append(record)
        try:
            request = self._config.target.request("POST", self._path, body)
            status, error_body = await self._pool.exchange(request, reader.feed)
            if status != 200:
                raise RequestFailed(f"HTTP {status}", error_text(error_body))
            reader.finish()
        except RequestFailed as error:
            record.error, record.detail = error.kind, error.detail
        except asyncio.CancelledError:
            record.is_cut = True
            raise
        finally:
            record.end_s = time.monotonic()
            record.times, record.counts = reader.times, reader.counts
            record.prompt_tokens, record.output_tokens = reader.prompt_tokens, reader.output_tokens
            record.counting = reader.counting
