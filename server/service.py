"""Life of the service: start the engine, serve, end the engine. Imports little, so that it starts fast.

Exit statuses: 0 after a signal, also while loading; 2 if a setting or the model's files must be changed first; 1 if the
engine or an HTTP process could not start for another reason, or if the engine died or hung while draining.
"""

import asyncio
import dataclasses
import logging
import socket
import ssl
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import uvloop

from engine.client import EngineClient
from engine.collector import resting_collector
from engine.config import EngineConfig
from engine.link import EngineLink
from engine.stack_dump import forward_on_signal
from loaders.hf_config import read_config
from server import streams
from server.config import ServerConfig
from server.errors import SettingError, StartError
from server.listener import url_of
from server.memory import settle_memory
from server.model_files import ModelFiles, read_model_files
from server.ready import Ready
from server.responses.store import open_store

if TYPE_CHECKING:
    from server.supervisor import Supervisor
    from server.uvicorn_server import DrainingServer

log = logging.getLogger(__name__)

_POLL_S = 0.02


def run(server_config: ServerConfig, engine_config: EngineConfig, listener: socket.socket) -> int:
    """Serve until a signal comes; returns the exit code. Raises SettingError or StartError if it cannot start."""
    if engine_config.num_ranks > 1:  # nothing is left to serve with, and other hosts wait for a new start
        server_config = dataclasses.replace(server_config, exit_on_engine_death=True)
    check_certificate(server_config)
    check_tracing(server_config)
    # Refuses a checkpoint with damaged small files before an engine loads its weights.
    check_context(engine_config)
    files = read_model_files(engine_config.model)
    if (store := open_store(server_config)) is not None:  # refuses a bad file now; HTTP processes open it themselves
        store.close()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(server_config, engine_config, files, listener))


async def _serve(
    server_config: ServerConfig,
    engine_config: EngineConfig,
    files: ModelFiles,
    listener: socket.socket,
) -> int:
    start_s = time.monotonic()
    engine = _make_engine(engine_config)
    await engine.start()
    engine_hangs = False
    try:
        server = _make_server(engine, server_config, engine_config, files)
        forward_on_signal(
            lambda: f"the service: {describe_link(engine)}", lambda: [*engine.process_ids, *server.process_ids]
        )
        url = url_of(listener, has_tls=server_config.ssl_certfile is not None)  # serving may close it
        announcing = asyncio.create_task(_announce(engine, server, server_config, engine_config, url, start_s))
        await server.serve(sockets=[listener])
        announcing.cancel()
        with suppress(asyncio.CancelledError):
            await announcing
        engine_hangs = server.engine_hangs
    finally:
        await engine.close(at_once=engine_hangs)
    if engine.failure is not None and engine.info is None:
        kind = SettingError if engine.has_wrong_setting else StartError
        raise kind(f"the engine cannot start: {engine.failure}")
    return 1 if engine.failure is not None or engine.was_killed or server.has_failed else 0


def _make_engine(config: EngineConfig) -> EngineClient:
    if config.num_ranks == 1:
        return EngineClient(config)
    from engine.rank_client import RankedEngineClient

    return RankedEngineClient(config)


def _make_server(
    engine: EngineClient,
    server_config: ServerConfig,
    engine_config: EngineConfig,
    files: ModelFiles,
) -> "DrainingServer | Supervisor":
    """What serves: this process, or several that it starts. The engine loads while this imports the web framework."""
    if server_config.api_workers > 1:
        from server.supervisor import Supervisor

        return Supervisor(engine, server_config, engine_config)
    with resting_collector():
        from server.app import create_app
        from server.uvicorn_server import DrainingServer, make_uvicorn_config

    app = create_app(engine, files.tokenizer, server_config, files.defaults)
    return DrainingServer(make_uvicorn_config(app, server_config), app.state.context)


def check_certificate(config: ServerConfig) -> None:
    """Raise SettingError if the service cannot serve HTTPS with the certificate and the key that are set.

    The message names the file at fault: the library's own errors name none.
    """
    if config.ssl_certfile is None:
        return
    for name, file in (("ssl_certfile", config.ssl_certfile), ("ssl_keyfile", config.ssl_keyfile)):
        try:
            if file is not None:
                file.open("rb").close()
        except OSError as error:
            raise SettingError(f"{name} {file} cannot be read: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(config.ssl_certfile)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise SettingError(f"ssl_certfile {config.ssl_certfile} holds no certificate in PEM form: {error}") from error
    try:
        password = config.ssl_keyfile_password or ""  # else the library would ask for one
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password)
    except (OSError, ValueError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise SettingError(
                f"ssl_keyfile {config.ssl_keyfile or config.ssl_certfile} belongs to another certificate: it is not "
                f"the key of ssl_certfile {config.ssl_certfile}"
            ) from error
        where = f"ssl_keyfile {config.ssl_keyfile}" if config.ssl_keyfile else f"ssl_certfile {config.ssl_certfile}"
        way_out = "" if config.ssl_keyfile else "; set ssl_keyfile if the key has a file of its own"
        raise SettingError(
            f"{where} has no usable private key: there is none in PEM form in it, or its password "
            f"(ssl_keyfile_password) is missing or wrong{way_out}"
        ) from error


def check_tracing(config: ServerConfig) -> None:
    """Raise SettingError if spans are to be sent and the packages for that are not installed."""
    if config.otlp_endpoint is None:
        return
    try:
        import server.tracing  # noqa: F401
    except ModuleNotFoundError as error:
        raise SettingError(
            f"otlp_endpoint needs the package {error.name}, which is not installed: pip install "
            "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, or serve without --otlp-endpoint"
        ) from error


def check_context(config: EngineConfig) -> None:
    """Raise SettingError if `--max-model-len` is more than the model was made for."""
    if config.max_model_len is None:
        return
    try:
        config.context_of(read_config(config.model).max_position_embeddings)
    except ValueError as error:
        raise SettingError(str(error)) from error


def describe_link(engine: EngineLink) -> str:
    """What this process knows of the engine, for SIGUSR1."""
    state = engine.failure or ("ready" if engine.ready else "not ready")
    return f"the engine is {state}, its last sign of life was {engine.heartbeat_age_s:.1f} s ago, {engine.stats}"


async def _announce(
    engine: EngineClient,
    server: "DrainingServer | Supervisor",
    config: ServerConfig,
    engine_config: EngineConfig,
    url: str,
    start_s: float,
) -> None:
    """What serves where, once it is ready; a failure to load ends the server. Says nothing once the server stops."""
    while not (engine.ready and server.started) and engine.failure is None:
        await asyncio.sleep(_POLL_S)
    if engine.failure is not None:
        server.should_exit = True  # `_serve` says why
    elif engine.info is not None and not server.should_exit:
        settle_memory()
        ready = Ready(
            names=config.served_model_name,
            url=url,
            seconds=time.monotonic() - start_s,
            info=engine.info,
            num_ranks=engine_config.num_ranks,
        )
        error = streams.write(sys.stdout, ready.text_for(sys.stdout, engine_config.log_format))
        if error is not None:
            log.warning("ready at %s, but standard output cannot be written: %s", ready.url, error.strerror)
