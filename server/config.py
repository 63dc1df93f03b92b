"""Settings of the HTTP side, checked when made. Reads neither argv nor the environment (`server.cli` does)."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.setting import check_settings, setting
from server.errors import SettingError
from server.keys import ClientKey, check_key, client_keys

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HTTP_URL = re.compile(r"https?://[^/\s]+(/\S*)?")
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
    page: bool = setting(
        True, "HTTP", "serve a page at / for browsers: chat with the model, and the state of the service"
    )
    api_key: str | None = setting(
        None,
        "HTTP",
        "key that every route but the page, /health, /health/live and /health/ready needs; several separated by "
        "commas; limits of its own may follow a key: 'KEY max_requests=4 tokens_per_minute=60000'",
        is_secret=True,
    )
    api_key_file: Path | None = setting(None, "HTTP", "file with such keys, one a line; # begins a comment line")
    admin_key: str | None = setting(
        None,
        "HTTP",
        "key that /metrics, /expert_load, /reset_prefix_cache, /start_profile and /stop_profile require instead of the "
        "others; opens every route",
        is_secret=True,
        default_text="none: the first two are like other routes, the others are closed to clients with keys",
    )
    max_requests_per_key: int | None = setting(
        None, "HTTP", "answers that a key without max_requests may have in flight", default_text="no limit", low=1
    )
    tokens_per_minute_per_key: int | None = setting(
        None,
        "HTTP",
        "tokens of prompts and answers that a key without tokens_per_minute may use in a minute",
        default_text="no limit",
        low=1,
    )
    ssl_certfile: Path | None = setting(None, "HTTP", "certificate chain (PEM): serve HTTPS instead of HTTP")
    ssl_keyfile: Path | None = setting(
        None, "HTTP", "private key of the certificate (PEM)", default_text="in the certificate's file"
    )
    ssl_keyfile_password: str | None = setting(None, "HTTP", "password of the private key", is_secret=True)
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
    response_store_bytes: int = setting(
        1024**3, "HTTP", "most bytes of stored answers; the oldest are removed", low=1, high=2**50
    )
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
    tolerant: bool = setting(
        False, "HTTP", "ignore unknown parameters of requests, and name them in the header X-Ignored-Parameters"
    )
    log_requests: Literal["off", "lengths", "text"] = setting(
        "off",
        "HTTP",
        "log a line for every request to generate: lengths and times, or prompts and answers too; "
        "the flag alone means lengths",
        bare="lengths",
    )
    slow_request_seconds: float | None = setting(
        None, "HTTP", "log requests to generate that take at least so many seconds, with lengths and times", above=0
    )
    otlp_endpoint: str | None = setting(
        None,
        "HTTP",
        "collector that gets OpenTelemetry spans of answers, by OTLP over HTTP, such as http://localhost:4318; "
        "needs the extra otel",
    )
    access_log: bool = setting(False, "HTTP", "log a line for every request")

    def __post_init__(self) -> None:
        check_settings(self, SettingError)
        if self.admin_key is not None:
            check_key("admin_key", self.admin_key)
        if any(key.text == self.admin_key for key in self.api_keys):
            raise SettingError("admin_key is one of the keys in api_key: give it to operators alone")
        for name in ("max_requests_per_key", "tokens_per_minute_per_key"):
            if getattr(self, name) is not None and not self.api_keys:
                raise SettingError(f"{name} needs keys to count for: set api_key or api_key_file, too")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_keyfile_password):
            raise SettingError("ssl_keyfile and ssl_keyfile_password belong to a certificate: set ssl_certfile, too")
        if self.client_header is not None and not _HEADER.fullmatch(self.client_header):
            raise SettingError(f"client_header is {self.client_header!r}: it must be the name of an HTTP header")
        if self.otlp_endpoint is not None and not _HTTP_URL.fullmatch(self.otlp_endpoint):
            raise SettingError(
                f"otlp_endpoint is '{self.otlp_endpoint}': it must be the URL of a collector that takes "
                "OTLP over HTTP, such as http://localhost:4318"
            )
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise SettingError(
                    f"cors_origins holds '{origin}': an origin is scheme://host or scheme://host:port without a path, "
                    "as browsers send it, or * for all"
                )
        if any(not name for name in self.served_model_name):
            raise SettingError("served_model_name holds an empty name: give names separated by commas")
        twice = next((name for name in self.served_model_name if self.served_model_name.count(name) > 1), None)
        if twice is not None:
            raise SettingError(f"served_model_name holds {twice!r} twice: give each name once")

    @property
    def api_keys(self) -> tuple[ClientKey, ...]:
        """The keys of clients; the place of a key is its number. `server.cli` has added those of `api_key_file`."""
        defaults = ClientKey(max_requests=self.max_requests_per_key, tokens_per_minute=self.tokens_per_minute_per_key)
        return () if self.api_key is None else client_keys(self.api_key, defaults)
