"""`Terms`: what must be the same on all hosts of an engine, and the words for what is not. No torch, no sockets."""

import dataclasses
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.version import service_version
from loaders.fingerprint import digest, fingerprint

_OF_EACH_HOST = frozenset(
    {
        "node_rank", "base_gpu_id", "master_addr", "log_format", "num_threads",
        "model", "eplb_load",  # folder and file: their contents must be the same
        "profile_dir", "tune_cache_dir",
    }
)  # fmt: skip
"""Settings that may differ between hosts. All others must be the same."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Of one host: the version of moe-serve, its settings, and a digest of each file that the ranks read."""

    version: str
    settings: dict[str, Any]
    files: dict[str, str]

    def difference(self, first: "Terms", host: int) -> str | None:
        """What to change if these, the terms of `host`, are not those of host 0, which are `first`; else None."""
        if self.version != first.version:  # with it the settings may differ, too
            return (
                f"moe-serve is of version {self.version} on host {host} and {first.version} on host 0: install the "
                "same on all hosts"
            )
        for name in first.settings | self.settings:
            own, others = self.settings.get(name), first.settings.get(name)
            if own != others:
                return (
                    f"{name} is {_shown(own)} on host {host} and {_shown(others)} on host 0: it must be the same on "
                    "all hosts"
                )
        for name in first.files | self.files:
            if self.files.get(name) != first.files.get(name):
                return (
                    f"{name} is not the same file on host {host} as on host 0: bring the same revision of the model to "
                    "all hosts"
                )
        return None


def terms_of(config: EngineConfig) -> Terms:
    """The terms of this host.

    Raises:
        LoadError, OSError: a file of the model, or that of eplb_load, is there and cannot be read.
    """
    names = [field.name for field in dataclasses.fields(config) if field.name not in _OF_EACH_HOST]
    settings = {name: getattr(config, name) for name in names}
    files = fingerprint(config.model, reads_weights=config.load_format != "dummy")
    if config.eplb_load is not None and config.eplb_load.is_file():
        files["the file of eplb_load"] = digest([config.eplb_load.read_bytes()])
    terms = Terms(version=service_version(), settings=settings, files=files)
    return msgspec.json.decode(msgspec.json.encode(terms, enc_hook=str), type=Terms)  # as those of another host come


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
