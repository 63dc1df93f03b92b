"""`Supervisor`: several HTTP processes around one engine (`--api-workers`). Serves no request itself.

    supervisor ──▶ engine process       starts it, or one for each rank; watches the heartbeats, ends it last
        │  accepts connections            ▲ requests          │ outputs, one message a step and HTTP process
        └────────▶ HTTP process 1 ... N ──┘ ◀─────────────────┘

An HTTP process that dies takes its connections with it; the engine ends their requests, and another process takes its
place. One that dies before it could serve ends the service, because the next one would too.
"""

import asyncio
import itertools
import logging
import signal
import socket
import time
from contextlib import suppress
from types import FrameType

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.process import describe_exit
from server.api_process import CUT, DRAIN, FAILED, ApiProcess, ApiSetup
from server.board import Board
from server.config import ServerConfig
from server.connections import Acceptor
from server.draining import LAST_CALL_S, SECOND_SIGNAL, signals_handled_by, wait_until_drained
from server.stall import StallWatch
from server.tally import Gauge

log = logging.getLogger(__name__)

_TICK_S = 0.02
_STOP_S = LAST_CALL_S + 2.0  # what a process has to stop: its connections get `LAST_CALL_S` of it


class Supervisor:
    """Starts the HTTP processes, and ends them after a signal as `DrainingServer` ends."""

    def __init__(self, engine: EngineClient, server_config: ServerConfig, engine_config: EngineConfig) -> None:
        self.should_exit = False
        self.engine_hangs = False  # set while draining
        self.has_failed = False  # an HTTP process could not serve
        self._engine = engine
        self._server_config = server_config
        self._engine_config = engine_config
        self._board = Board.create(
            server_config.api_workers,
            server_config.served_model_name,
            len(server_config.api_keys),
            engine_config.data_parallel_size,
        )
        self._stall = StallWatch(engine, server_config.stall_timeout)
        self._origins = itertools.count(1)
        self._processes: dict[int, ApiProcess] = {}  # by slot; only those that run
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_signals = 0
        self._draining: asyncio.Task[None] | None = None
        self._is_failure_told = False

    @property
    def started(self) -> bool:
        """True once all processes serve and know that the engine is ready, which it tells each by itself."""
        processes = self._processes.values()
        are_all = len(processes) == self._server_config.api_workers
        return are_all and all(each.is_serving and each.is_ready for each in processes)

    @property
    def process_ids(self) -> list[int]:
        """Ids of the HTTP processes."""
        return [each.pid for each in self._processes.values() if each.pid is not None]

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Serve the connections of a listening socket until drained."""
        [listener] = sockets
        self._loop = asyncio.get_running_loop()
        self._acceptor = Acceptor(listener)
        with signals_handled_by(self.handle_exit):
            try:
                await asyncio.gather(*(self._start(index) for index in range(self._server_config.api_workers)))
                while not self.should_exit:
                    self._tick()
                    await asyncio.sleep(_TICK_S)
            finally:
                await self._stop()

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        """Count a signal. A third one stops without waiting, and SIGHUP is never a second or third one."""
        if sig != signal.SIGHUP:
            self._num_signals += 1
        if self._num_signals > SECOND_SIGNAL:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._start_draining, signal.Signals(sig).name)

    def _tick(self) -> None:
        failure = self._engine.failure
        self._stall.check()
        for process in self._processes.values():
            process.channel.flush()
        if failure is not None and not self._is_failure_told:
            self._is_failure_told = True
            for process in self._processes.values():
                process.channel.send(FAILED + failure.encode())
        if failure is not None and self._server_config.exit_on_engine_death:
            self._start_draining("the engine has died")

    async def _start(self, index: int) -> None:
        """Start the process of a slot."""
        process = ApiProcess(index, next(self._origins), self._board)
        process.on_serving = self._update_receivers
        self._processes[index] = process
        await process.start(
            ApiSetup(
                server_config=self._server_config,
                engine_config=self._engine_config,
                requests_address=self._engine.requests_address,
                origin=process.origin,
                index=index,
                num_workers=self._server_config.api_workers,
                board_descriptor=self._board.descriptor,
                channel_descriptor=process.channel.other_end.fileno(),
                started_s=self._board.started_s,
            )
        )
        failure = self._engine.failure
        if failure is not None:
            process.channel.send(FAILED + failure.encode())
        if self.should_exit:  # decided meanwhile
            await process.end(0)
        self._keep(asyncio.ensure_future(self._watch(process)))

    async def _watch(self, process: ApiProcess) -> None:
        """Wait for a process to end, and start another in its place if the service goes on."""
        status = await process.wait()
        del self._processes[process.index]
        process.channel.close()
        self._update_receivers()
        self._board.reset_gauges(process.index)
        self._engine.send_leave(process.origin)
        if self.should_exit or self._draining is not None:
            return
        how = describe_exit(status)
        if process.has_served:
            log.error("HTTP process %d %s; another takes its place", process.index, how)
            await self._start(process.index)
        else:
            log.error("HTTP process %d %s before it could serve", process.index, how)
            self.has_failed = self.should_exit = True

    def _update_receivers(self) -> None:
        """Connections go to the processes that serve."""
        if not self.should_exit:
            self._acceptor.set_receivers([each for each in self._processes.values() if each.is_serving])

    def _start_draining(self, reason: str) -> None:
        if self._draining is None:
            log.info("%s: draining", reason)
            for process in self._processes.values():
                process.channel.send(DRAIN)
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        cut = await wait_until_drained(
            self._engine,
            self._server_config,
            is_idle=self._are_idle,
            wait_idle=lambda: asyncio.sleep(_TICK_S),
            num_signals=lambda: self._num_signals,
        )
        if cut is not None:
            self.engine_hangs = cut.engine_hangs
            log.warning("%s: ending %d requests", cut.reason, self._board.sum_gauge(Gauge.IN_FLIGHT))
            for process in self._processes.values():
                process.channel.send(CUT)
            until_s = time.monotonic() + LAST_CALL_S  # a client may not read its error
            while not self._are_idle() and time.monotonic() < until_s:
                await asyncio.sleep(_TICK_S)
        self.should_exit = True

    def _are_idle(self) -> bool:
        """A process that does not serve yet has no request."""
        return all(process.is_idle or not process.is_serving for process in self._processes.values())

    async def _stop(self) -> None:
        """End all processes, at once after a third signal."""
        self.should_exit = True
        self._acceptor.close()
        if self._draining is not None:
            self._draining.cancel()
        is_forced = self._num_signals > SECOND_SIGNAL
        timeout_s = 0.0 if is_forced else _STOP_S
        ends = await asyncio.gather(*(each.end(timeout_s) for each in self._processes.values()))
        if any(ends):
            log.warning("%d HTTP processes did not stop in time and were killed", sum(ends))
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.gather(*self._tasks)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
