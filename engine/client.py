"""`EngineClient`: starts the engine process, watches it and ends it; `EngineLink` is what it can do with requests."""

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from engine.admission import Places
from engine.config import EngineConfig
from engine.link import EngineLink
from engine.messages import EXIT_SETTING, EXITS_TOLD, Leave, Shutdown, WorkerSetup, new_address
from engine.process import WorkerProcess, describe_exit

if TYPE_CHECKING:
    from engine.rank_processes import RankProcesses

_LAST_WORD_S = 2.0  # how long a message may still be on its way after the process has ended

logger = logging.getLogger(__name__)


class EngineClient(EngineLink):
    """One engine process, its requests and its health. All methods belong to one event loop."""

    def __init__(self, config: EngineConfig, *, worker_module: str = "engine.worker") -> None:
        """`worker_module` is what the engine process runs."""
        places = Places(config.max_requests * config.data_parallel_size)
        super().__init__(config, range(config.num_ranks), places=places)
        self.was_killed = False  # `close` had to kill a process that was ready
        self.requests_address = new_address()
        self._worker_module = worker_module
        self._process: WorkerProcess | RankProcesses | None = None

    async def start(self) -> None:
        """Start the process and return; loading goes on. Watch `ready` and `failure`."""
        setup = WorkerSetup(
            config=self.config,
            requests_address=self.requests_address,
            outputs_address=self._open(self.requests_address, new_address()),
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        self._process = await WorkerProcess.start(self._worker_module, setup)
        self._watcher = asyncio.create_task(self._watch_process(self._process))

    @property
    def alive(self) -> bool:
        """True while the process exists and has not given up."""
        return super().alive and self._process is not None and self._process.is_running

    @property
    def pid(self) -> int | None:
        """Id of the engine process, None before the start."""
        return None if self._process is None else self._process.pid

    @property
    def process_ids(self) -> list[int]:
        """Ids of the engine's processes on this host."""
        return [] if self._process is None else [self._process.pid]

    def fail(self, message: str, *, is_setting: bool = False) -> None:
        """Log it too, unless it is a failure to start, which the one who starts will report."""
        if self.failure is None and not self._closing and self.info is not None:
            logger.error("%s", message)
        super().fail(message, is_setting=is_setting)

    def send_leave(self, origin: int) -> None:
        """Tell the engine that a process which had joined has ended."""
        self._send(Leave(origin))

    async def close(self, *, at_once: bool = False) -> None:
        """End the process; requests still running get an error. May be called twice, and without `start`.

        `at_once` kills the process without waiting; use it when the engine is known to hang.
        """
        if self._process is None or self._closing:
            return
        was_ready = self.ready
        self._closing = True
        self._end_streams()
        if was_ready and not at_once:
            self._send(Shutdown())
        self.was_killed = await self._process.end(told_to_stop=was_ready, at_once=at_once) and was_ready
        if self.was_killed:
            logger.error("the engine process did not end by itself and was killed")
        await self._watcher
        self._close()

    async def _watch_process(self, process: WorkerProcess) -> None:
        """Wait for the process to end, then a moment longer for a `Failed` message that is still on its way."""
        status = await process.wait()
        until_s = time.monotonic() + _LAST_WORD_S
        while status in EXITS_TOLD and self.failure is None and not self._closing and time.monotonic() < until_s:
            self._read_messages()
            await asyncio.sleep(0.01)
        self.fail(f"the engine process {describe_exit(status)}; its log says why", is_setting=status == EXIT_SETTING)
