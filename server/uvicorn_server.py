"""The uvicorn server: settings of its connections, and draining after a signal. Starts no engine."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from server.config import ServerConfig
from server.context import ServerContext
from server.draining import LAST_CALL_S, SECOND_SIGNAL, sighup_handled_by, wait_until_drained
from server.open_files import FullWarning
from server.protocol import GuardedProtocol, WrittenTogether

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75  # longer than common load balancers keep idle connections


class DrainingServer(uvicorn.Server):
    """Drains at SIGTERM, SIGINT and SIGHUP: takes no new work, lets running work finish, then stops listening.

    The port stays open meanwhile, so that readiness probes get a 503. Requests still running end with a 503 at the
    drain timeout, at a second signal, or as soon as the engine hangs. A third signal stops without waiting. A SIGHUP
    never counts as a second or third signal, because a terminal that closes may send several.
    """

    has_failed = False  # as of `Supervisor`: here an error is raised
    process_ids: tuple[int, ...] = ()  # as of `Supervisor`: this process alone serves

    def __init__(self, config: uvicorn.Config, context: ServerContext) -> None:
        super().__init__(config)
        self.engine_hangs = False  # set while draining
        self._context = context
        self._full = FullWarning()
        self._num_signals = 0
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until drained."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets=sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn's signals and SIGHUP."""
        with super().capture_signals(), sighup_handled_by(self.handle_exit):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count a signal. Runs between any two bytecodes, so it leaves the work to the event loop."""
        if sig != signal.SIGHUP:
            self._num_signals += 1
        if self._loop is None or self._num_signals > SECOND_SIGNAL:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._start_draining, signal.Signals(sig).name)

    async def on_tick(self, counter: int) -> bool:
        """Uvicorn calls this ten times a second; True ends the server."""
        context = self._context
        context.stall.check()
        self._full.check()
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
        cut = await wait_until_drained(
            self._context.engine,
            self._context.config,
            is_idle=lambda: not gate.num_inflight,
            wait_idle=gate.wait_idle,
            num_signals=lambda: self._num_signals,
        )
        if cut is not None:
            self.engine_hangs = cut.engine_hangs
            log.warning("%s: ending %d requests", cut.reason, gate.num_inflight)
            gate.cut()
            with suppress(TimeoutError):  # of a client that does not read its error
                await asyncio.wait_for(gate.wait_idle(), LAST_CALL_S)
        self.should_exit = True


def make_uvicorn_config(
    app: FastAPI, config: ServerConfig, on_close: Callable[[], None] | None = None
) -> uvicorn.Config:
    """How connections are served; the app needs no lifespan of its own. `on_close` is called when one has closed."""
    return uvicorn.Config(
        app,
        http=partial(  # type: ignore[arg-type]
            GuardedProtocol, head_timeout_s=config.receive_timeout, together=WrittenTogether(), on_close=on_close
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="info" if config.access_log else "warning",
        access_log=config.access_log,
        proxy_headers=False,  # `client_header` alone says which header of a proxy names the client
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_CALL_S,
        server_header=False,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_keyfile_password=config.ssl_keyfile_password,
    )
