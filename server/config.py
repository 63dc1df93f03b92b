"""Settings of the HTTP side, checked when made. Reads neither argv nor the environment (`server.cli` does)."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from server.errors import SettingError

_KEY = re.compile(r"[!-~]+")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the HTTP process needs to know. Times are in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    revision: str | None = None  # of a model on the hub: a branch, a tag or a commit; None: the main branch
    client_header: str | None = None
    cors_origins: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    drain_timeout: float = 25.0  # leaves time to shut down within the 30 s that Kubernetes gives
    heartbeat_timeout: float = 60.0
    stall_timeout: float = 60.0
    exit_on_engine_death: bool = False
    receive_timeout: float = 60.0
    max_body_bytes: int = 4 * 1024 * 1024
    default_temperature: float | None = None
    default_top_p: float | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    access_log: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SettingError(f"port is {self.port}: it must lie between 0 and 65535 (0 picks a free one)")
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
        if not 0 <= self.drain_timeout < math.inf:  # a NaN fails too
            raise SettingError(f"drain_timeout is {self.drain_timeout}: it must be a number of seconds, 0 or more")
        for field in ("heartbeat_timeout", "stall_timeout", "receive_timeout", "max_body_bytes"):
            if not 0 < getattr(self, field) < math.inf:
                raise SettingError(f"{field} is {getattr(self, field)}: it must be above 0 and finite")
        if self.default_temperature is not None and not 0 <= self.default_temperature <= 2:
            raise SettingError(f"default_temperature is {self.default_temperature}: it must lie between 0 and 2")
        if self.default_top_p is not None and not 0 < self.default_top_p <= 1:
            raise SettingError(f"default_top_p is {self.default_top_p}: it must be above 0 and at most 1")
