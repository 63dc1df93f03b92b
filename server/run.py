"""Life of the service: bind the port, start the engine, serve, drain on SIGTERM, end the engine."""

import asyncio
import logging
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.types import EngineInfo
from loaders.tokenizer import Tokenizer, load_tokenizer
from server.app import create_app
from server.config import ServerConfig
from server.context import Gate
from server.errors import SettingError
from server.listener import url_of
from server.sampling_defaults import SamplingDefaults, read_sampling_defaults

log = logging.getLogger(__name__)

_POLL_S = 0.02
_LAST_CALL_S = 2  # what connections get to close once the drain timeout has cut their requests
_KEEP_ALIVE_S = 75  # longer than common load balancers keep idle connections


def run(server_config: ServerConfig, engine_config: EngineConfig, listener: socket.socket) -> int:
    """Serve until a signal comes; returns the exit code. Raises SettingError if the service cannot start."""
    logging.basicConfig(
        level=server_config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    defaults = read_sampling_defaults(engine_config.model)
    loop_factory = uvicorn.Config("", loop="auto").get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_serve(server_config, engine_config, defaults, listener))


async def _serve(
    server_config: ServerConfig, engine_config: EngineConfig, defaults: SamplingDefaults, listener: socket.socket
) -> int:
    start_s = time.monotonic()
    engine = EngineClient(engine_config)
    await engine.start()
    try:
        # The engine's process loads the weights meanwhile.
        tokenizer = await asyncio.to_thread(_load_tokenizer, engine_config.model)
        app = create_app(engine, tokenizer, server_config, defaults)
        server = DrainingServer(make_uvicorn_config(app, server_config), app.state.context.gate, server_config)
        announcing = asyncio.create_task(_announce(engine, server, server_config, listener, start_s))
        await server.serve(sockets=[listener])
        announcing.cancel()
        with suppress(asyncio.CancelledError):
            await announcing
        return 1 if engine.failure is not None else 0
    finally:
        await engine.close()


def _load_tokenizer(folder: Path) -> Tokenizer:
    try:
        return load_tokenizer(folder)
    except ValueError as error:
        raise SettingError(f"--model: {error}") from error


async def _announce(
    engine: EngineClient, server: "DrainingServer", config: ServerConfig, listener: socket.socket, start_s: float
) -> None:
    """One line with the address and one with the MoE paths once ready; a failure to load ends the server."""
    while not engine.ready and engine.failure is None:
        await asyncio.sleep(_POLL_S)
    if engine.failure is not None:
        sys.stderr.write(f"moe-serve: --model: {engine.failure}\n")
        server.should_exit = True
    elif engine.info is not None:
        names = ", ".join(config.served_model_name)
        sys.stdout.write(
            f"moe-serve: {names} ready at {url_of(listener)}/v1 after {time.monotonic() - start_s:.1f} s\n"
            f"moe-serve: {summarize_paths(engine.info)}\n"
        )
        sys.stdout.flush()


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
        self.should_exit = True


def make_uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """How connections are served; the app needs no lifespan of its own."""
    return uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        log_level="info" if config.access_log else "warning",
        access_log=config.access_log,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LAST_CALL_S,
        server_header=False,
    )


def summarize_paths(info: EngineInfo) -> str:
    """How many MoE layers take which path, and on what."""
    paths = Counter(line.partition(": ")[2] or line for line in info.moe_paths)
    listed = ", ".join(f"{count} MoE layers by {path}" for path, count in paths.items()) or "no MoE layers"
    return f"{listed} on {info.device} in {info.dtype}"
