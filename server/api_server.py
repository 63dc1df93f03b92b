"""`ApiServer`: serves the connections that the supervisor hands to one of several HTTP processes, and obeys its orders.

Orders and reports are packets on one socket, the channel; a connection is a packet with a descriptor.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from fastapi import FastAPI

from server.api_process import CONNECTION, CUT, DRAIN, FAILED, IDLE, MAX_PACKET_BYTES, SERVING
from server.config import ServerConfig
from server.context import ServerContext
from server.open_files import FullWarning
from server.tally import Gauge, Tally
from server.uvicorn_server import make_uvicorn_config

log = logging.getLogger(__name__)


class ApiServer(uvicorn.Server):
    """Handles no signals: the supervisor decides."""

    def __init__(
        self,
        app: FastAPI,
        config: ServerConfig,
        *,
        channel: socket.socket,
        tally: Tally,
        on_engine_failure: Callable[[str], None],
    ) -> None:
        super().__init__(make_uvicorn_config(app, config, self._count_closed))
        self._context: ServerContext = app.state.context
        self._channel = channel
        self._tally = tally
        self._on_engine_failure = on_engine_failure
        self._num_closed = 0
        self._full = FullWarning()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them as they are."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen to the supervisor instead of a port."""
        self.servers = []
        self._channel.setblocking(False)
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._read_orders)
        self._channel.send(SERVING)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and close those there are."""
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Uvicorn calls this ten times a second; True ends the server."""
        self._context.stall.check()
        self._full.check()
        return await super().on_tick(counter)

    def _read_orders(self) -> None:
        with suppress(BlockingIOError):
            while not self.should_exit:
                packet, descriptors, _, _ = socket.recv_fds(self._channel, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                if descriptors:
                    self._start(self._serve_connection(socket.socket(fileno=descriptors[0])))
                else:
                    self._obey(packet)

    def _obey(self, order: bytes) -> None:
        gate = self._context.gate
        if order == DRAIN:
            gate.drain()
            self._start(self._report_idle())
        elif order == CUT:
            gate.cut()
        elif order.startswith(FAILED):
            self._on_engine_failure(order.removeprefix(FAILED).decode())
        elif order == CONNECTION:  # this process may open no more files, so the kernel has closed it
            self._full.give()
            self._count_closed()
        else:  # EXIT, or nothing at all: the supervisor is gone
            self.should_exit = True

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve_connection(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            loop, tls = asyncio.get_running_loop(), self.config.ssl
            await loop.connect_accepted_socket(self._make_protocol, connection, ssl=tls)
        except OSError as error:  # the client has left already
            log.debug("a connection could not be served: %s", error)
            connection.close()
            self._count_closed()

    def _make_protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def _report_idle(self) -> None:
        await self._context.gate.wait_idle()
        with suppress(OSError):  # the supervisor is gone
            self._channel.send(IDLE)

    def _count_closed(self) -> None:
        self._num_closed += 1
        self._tally.set_gauge(Gauge.CLOSED, self._num_closed)
