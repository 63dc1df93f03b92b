"""The uvicorn server: settings of its connections, and draining after a signal. Starts no engine."""

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from server.config import ServerConfig
from server.context import ServerContext
from server.protocol import GuardedProtocol

log = logging.getLogger(__name__)

_LAST_CALL_S = 2  # what connections get to close once the drain timeout has cut their requests
_KEEP_ALIVE_S = 75  # longer than common load balancers keep idle connections
_HANGS_AFTER_S = 5.0  # while draining; a healthy engine sends its statistics more often
_POLL_S = 0.05
_SECOND_SIGNAL = 2


class DrainingServer(uvicorn.Server):
    """Drains at SIGTERM, SIGINT and SIGHUP: takes no new work, lets running work finish, then stops listening.

    The port stays open meanwhile, so that readiness probes get a 503. Requests still running end with a 503 at the
    drain timeout, at a second signal, or as soon as the engine hangs. A third signal stops without waiting. A SIGHUP
    never counts as a second or third signal, because a terminal that closes may send several.
    """

    def __init__(self, config: uvicorn.Config, context: ServerContext) -> None:
        super().__init__(config)
        self.engine_hangs = False  # set while draining
        self._context = context
        self._num_signals = 0
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until drained."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets=sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn's signals and SIGHUP; one that `nohup` had the process ignore stays ignored."""
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        with super().capture_signals():
            if is_ignored or threading.current_thread() is not threading.main_thread():
                yield
                return
            before = signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count a signal. Runs between any two bytecodes, so it leaves the work to the event loop."""
        if sig != signal.SIGHUP:
            self._num_signals += 1
        if self._loop is None or self._num_signals > _SECOND_SIGNAL:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._start_draining, signal.Signals(sig).name)

    async def on_tick(self, counter: int) -> bool:
        """Uvicorn calls this ten times a second; True ends the server."""
        context = self._context
        context.stall.check()
        if context.config.exit_on_engine_death and context.engine.failure is not None:
            self._start_draining("the engine has died")
        return await super().on_tick(counter)

    def _start_draining(self, reason: str) -> None:
        if self._draining is None:
            log.info("%s: draining", reason)
            self._context.gate.drain()
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        gate = self._context.gate
        reason = await self._why_cut()
        if reason is not None:
            log.warning("%s: ending %d requests", reason, gate.num_inflight)
            gate.cut()
            with suppress(TimeoutError):  # of a client that does not read its error
                await asyncio.wait_for(gate.wait_idle(), _LAST_CALL_S)
        self.should_exit = True

    async def _why_cut(self) -> str | None:
        """Wait for running requests. Returns None once all have ended, else why we no longer wait."""
        config, engine = self._context.config, self._context.engine
        until_s = time.monotonic() + config.drain_timeout
        while self._context.gate.num_inflight:
            if engine.failure is not None:
                return "the engine has died"
            if engine.heartbeat_age_s > min(_HANGS_AFTER_S, config.heartbeat_timeout):
                self.engine_hangs = True
                return f"the engine hangs: no heartbeat for {engine.heartbeat_age_s:.1f} s"
            if self._num_signals >= _SECOND_SIGNAL:
                return "a second signal"
            if time.monotonic() >= until_s:
                return "the drain timeout is over"
            with suppress(TimeoutError):
                await asyncio.wait_for(self._context.gate.wait_idle(), _POLL_S)
        return None


def make_uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """How connections are served; the app needs no lifespan of its own."""
    return uvicorn.Config(
        app,
        http=partial(GuardedProtocol, head_timeout_s=config.receive_timeout),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="info" if config.access_log else "warning",
        access_log=config.access_log,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LAST_CALL_S,
        server_header=False,
    )
