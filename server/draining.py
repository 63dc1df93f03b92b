"""The uvicorn server: how connections are served, and how it stops without cutting anybody off. Starts no engine."""

import asyncio
import logging
import signal
import socket
from contextlib import suppress
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from server.config import ServerConfig
from server.context import Gate
from server.protocol import GuardedProtocol

log = logging.getLogger(__name__)

_LAST_CALL_S = 2  # what connections get to close once the drain timeout has cut their requests
_KEEP_ALIVE_S = 75  # longer than common load balancers keep idle connections


class DrainingServer(uvicorn.Server):
    """On the first signal: take no new work, let running work finish within the drain timeout, then stop listening.

    The port stays open meanwhile, so that readiness probes get their 503. A second signal stops at once.
    """

    def __init__(self, config: uvicorn.Config, gate: Gate, settings: ServerConfig) -> None:
        super().__init__(config)
        self._gate = gate
        self._drain_timeout = settings.drain_timeout
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until drained."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets=sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; called between bytecodes, so the loop does the rest."""
        if self._gate.draining:
            self.should_exit = self.force_exit = True
            return
        log.info("%s: draining", signal.Signals(sig).name)
        self._gate.drain()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        try:
            await asyncio.wait_for(self._gate.wait_idle(), self._drain_timeout)
        except TimeoutError:
            log.warning("%d requests did not finish within the drain timeout", self._gate.num_inflight)
            self._gate.cut()
            with suppress(TimeoutError):  # of a client that does not read its error
                await asyncio.wait_for(self._gate.wait_idle(), _LAST_CALL_S)
        self.should_exit = True


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
