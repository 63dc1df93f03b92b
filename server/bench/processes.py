"""Runs the load in several client processes that start at the same moment, and measures the CPU time of each."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any

from loaders.progress import Progress
from server.bench.config import BenchConfig
from server.bench.errors import BenchError
from server.bench.load import Load, Record, Share
from server.bench.workload import Accepted
from server.open_files import raise_limit

_HEAD_START_S = 0.2  # from "all are ready" to the first request, so that every process has read the message
_REPORT_EVERY_S = 0.2
_JOIN_S = 5.0


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """What one client process has seen; `cpu_s` of `wall_s` it was busy itself."""

    records: list[Record]
    cpu_s: float
    wall_s: float

    @property
    def cpu_share(self) -> float:
        """Part of one core that the process used."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """All processes of a run, which began at `start_s` of the monotonic clock."""

    start_s: float
    processes: list[ProcessResult]

    @property
    def records(self) -> list[Record]:
        """The requests of all processes, in the order in which they were due."""
        return sorted((record for each in self.processes for record in each.records), key=lambda each: each.start_s)

    @property
    def duration_s(self) -> float:
        """From the start to the end of the last process."""
        return max(each.wall_s for each in self.processes)


def run_processes(config: BenchConfig, accepted: Accepted) -> RunResult:
    """Warm up, run and collect; shows progress on standard error.

    Raises:
        BenchError: a client process failed or died.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Pipe] = []
    workers = []
    try:
        for index in range(config.processes):
            ours, theirs = context.Pipe()
            share = Share(index, config.processes)
            worker = context.Process(target=_client, args=(theirs, config, accepted, share), daemon=True)
            worker.start()
            theirs.close()
            pipes.append(ours)
            workers.append(worker)
        for pipe in pipes:
            _receive(pipe)  # warmed up
        start_s = time.monotonic() + _HEAD_START_S
        for pipe in pipes:
            pipe.send(start_s)
        return RunResult(start_s, _collect(config, pipes, start_s))
    finally:
        for pipe in pipes:
            pipe.close()
        for worker in workers:
            worker.join(_JOIN_S if worker.exitcode is None else 0)
            if worker.exitcode is None:
                worker.kill()
                worker.join()


def _collect(config: BenchConfig, pipes: list[Pipe], start_s: float) -> list[ProcessResult]:
    results: dict[int, ProcessResult] = {}
    done = [0] * len(pipes)
    with Progress("benchmark", 1000) as progress:
        shown = 0
        while len(results) < len(pipes):
            ready = wait([pipe for index, pipe in enumerate(pipes) if index not in results], _REPORT_EVERY_S)
            for pipe in ready:
                index = pipes.index(pipe)  # type: ignore[arg-type]
                news = _receive(pipes[index])
                if isinstance(news, ProcessResult):
                    results[index] = news
                else:
                    done[index] = news
            now = _thousandths(config, sum(done), time.monotonic() - start_s)
            progress.advance(max(0, now - shown))
            shown = max(now, shown)
        progress.advance(1000 - shown)
    return [results[index] for index in range(len(pipes))]


def _thousandths(config: BenchConfig, num_done: int, passed_s: float) -> int:
    """How much of the run is over: by requests or by time, whichever will end it."""
    parts = [0.0]
    if config.num_requests is not None:
        parts.append(num_done / config.num_requests)
    if config.seconds is not None:
        parts.append(passed_s / config.seconds)
    return min(1000, int(1000 * max(parts)))


def _receive(pipe: Pipe) -> Any:
    """The next message of a client process. Raises BenchError if it failed or died."""
    try:
        news = pipe.recv()
    except (EOFError, OSError):
        raise BenchError("a client process died") from None
    if isinstance(news, BenchError):
        raise news
    return news


def _client(pipe: Pipe, config: BenchConfig, accepted: Accepted, share: Share) -> None:
    """Main function of a client process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise_limit()  # random arrivals need a connection each
    with contextlib.suppress(BrokenPipeError, EOFError), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            result: ProcessResult | BenchError = runner.run(_run_share(pipe, config, accepted, share))
        except BenchError as error:
            result = error
        pipe.send(result)


async def _run_share(pipe: Pipe, config: BenchConfig, accepted: Accepted, share: Share) -> ProcessResult:
    parent = multiprocessing.parent_process()
    if parent is not None:  # without this, the load on the server would outlive a command that was killed
        asyncio.get_running_loop().add_reader(parent.sentinel, os._exit, 1)
    reporter = _Reporter(pipe)
    load = Load(config, accepted, share, reporter.count)
    await load.warm_up()
    pipe.send("ready")
    start_s = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    before_cpu_s = time.process_time()
    await load.run(start_s)
    wall_s, cpu_s = time.monotonic() - start_s, time.process_time() - before_cpu_s
    load.close()
    return ProcessResult(load.records, cpu_s, wall_s)


class _Reporter:
    """Tells the parent, not too often, how many requests have ended."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._num_done = 0
        self._last_s = 0.0

    def count(self) -> None:
        self._num_done += 1
        now_s = time.monotonic()
        if now_s - self._last_s >= _REPORT_EVERY_S:
            self._last_s = now_s
            self._pipe.send(self._num_done)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where there is one: it costs less per packet."""
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop
