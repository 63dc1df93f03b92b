"""Settings of the HTTP side, checked when made. Reads neither argv nor the environment (`server.cli` does)."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.setting import check_settings, setting
from server.errors import SettingError

_KEY = re.compile(r"[!-~]+")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the HTTP process needs to know. Times are in seconds, sizes in bytes."""

    revision: str | None = setting(
        None, "model", "branch, tag or commit of a model on the hub", default_text="the main branch"
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "model",
        "names under which the API serves the model, separated by commas",
        default_text="the name on the hub, or the folder's",
    )
    default_temperature: float | None = setting(
        None,
        "model",
        "temperature of requests that set none",
        default_text="the checkpoint's, else 1",
        low=0,
        high=2,
    )
    default_top_p: float | None = setting(
        None, "model", "top_p of requests that set none", default_text="the checkpoint's, else 1", above=0, high=1
    )

    host: str = setting("127.0.0.1", "HTTP", "address to listen on; 0.0.0.0 for all")
    port: int = setting(8000, "HTTP", "port to listen on; 0 picks a free one", low=0, high=65535)
    api_workers: int = setting(
        1, "HTTP", "HTTP processes that share the port and the engine; more than one for many streams", low=1, high=64
    )
    api_key: str | None = setting(
        None, "HTTP", "key that every route but /health, /health/live and /health/ready requires", is_secret=True
    )
    client_header: str | None = setting(
        None,
        "HTTP",
        "header that names the client, such as X-Forwarded-For; only behind a proxy that sets it itself",
        default_text="none: clients are told apart by address",
    )
    cors_origins: tuple[str, ...] = setting(
        (), "HTTP", "origins whose pages may call the API from a browser, separated by commas; * for all"
    )
    max_body_bytes: int = setting(4 * 1024 * 1024, "HTTP", "largest request body in bytes", low=1)
    response_store: Path | None = setting(
        None,
        "HTTP",
        "SQLite file on a local disk for answers of /v1/responses, made if it is missing",
        default_text="none: answers are not stored",
    )
    response_store_bytes: int = setting(1024**3, "HTTP", "most bytes of stored answers; the oldest are removed", low=1)
    response_store_age: float = setting(30 * 86400.0, "HTTP", "seconds after which a stored answer is removed", above=0)
    drain_timeout: float = setting(  # leaves time to shut down within the 30 s that Kubernetes gives
        25.0, "HTTP", "seconds that running requests have to finish after SIGTERM", low=0
    )
    heartbeat_timeout: float = setting(
        60.0, "HTTP", "seconds without a heartbeat of the engine until /health/live answers 503", above=0
    )
    stall_timeout: float = setting(
        60.0, "HTTP", "seconds without a token while requests wait or run, until /health/ready answers 503", above=0
    )
    exit_on_engine_death: bool = setting(
        False, "HTTP", "exit with status 1 when the engine dies, instead of answering 503; several ranks always do"
    )
    metrics_names: Literal["own", "vllm"] = setting(
        "own", "HTTP", "names of /metrics: our own alone, or those of vLLM too, which existing boards read"
    )
    receive_timeout: float = setting(
        60.0, "HTTP", "seconds a client has to send a request's head, and again its body", above=0
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "HTTP", "least severe messages that are logged"
    )
    access_log: bool = setting(False, "HTTP", "log a line for every request")

    def __post_init__(self) -> None:
        check_settings(self, SettingError)
        if self.api_key is not None and not _KEY.fullmatch(self.api_key):
            raise SettingError(
                "api_key is empty or holds spaces or characters beyond ASCII, which cannot be sent in a header: "
                "give another key, or leave the setting out to serve without one"
            )
        if self.client_header is not None and not _HEADER.fullmatch(self.client_header):
            raise SettingError(f"client_header is {self.client_header!r}: it must be the name of an HTTP header")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise SettingError(
                    f"cors_origins holds '{origin}': an origin is scheme://host or scheme://host:port without a path, "
                    "as browsers send it, or * for all"
                )
        if any(not name for name in self.served_model_name):
            raise SettingError("served_model_name holds an empty name: give names separated by commas")
