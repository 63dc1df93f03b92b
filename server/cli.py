"""The command line: the only module that reads argv and the environment. Hands the settings to `server.service`."""

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.logs import json_line, log_to_stderr
from engine.version import service_version
from server import streams
from server.bench.command import bench
from server.chat.command import chat
from server.config import ServerConfig
from server.configs import make_configs
from server.errors import SettingError, StartError
from server.experts import experts
from server.explain import explain
from server.health import health
from server.hub import Needs, download
from server.listener import bind
from server.model_source import HubModel, check_model_folder
from server.plan import plan
from server.service_links import service_links
from server.settings import Setting, gather, make_parser, settings_of

PROGRAM = "moe-serve"
START_FAILED, USAGE_ERROR = 1, 2
COMMANDS = {
    "bench": "measure a server under load, or draw what was measured",
    "chat": "talk to a running server in the terminal",
    "completion": "print what a shell needs to complete this command",
    "doctor": "say what keeps the service from running here, and the way out",
    "experts": "show how evenly a running service uses its experts",
    "explain": "say which kernels a GPU and a format get, and why",
    "health": "ask a running service whether it is alive",
    "plan": "say what of a model fits into a GPU",
}
_DESCRIPTION = "Serve a mixture-of-experts model behind the OpenAI HTTP API."


log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0 after a clean stop, 1 if the engine failed, 2 for a wrong setting.

    Where a service's log is JSON, the reason is a record of it.
    """
    argv = sys.argv[1:] if argv is None else argv
    settings = all_settings()
    is_command = bool(argv) and argv[0] in COMMANDS
    log_format = None
    try:
        links = service_links(os.environ)
        environ = {name: text for name, text in os.environ.items() if name not in links}
        if is_command:
            return _run_command(argv[0], argv[1:], settings, environ)
        log_format = _asked_log_format(argv, environ.get(settings["log_format"].variable))
        flags = vars(make_parser(settings, PROGRAM, _DESCRIPTION, COMMANDS).parse_args(argv))
        if flags.get("version"):
            streams.say(f"{PROGRAM} {service_version()}\n")
            return 0
        given = gather(settings, flags, environ)
        log_format = given.get("log_format")
        values = {"tune_cache_dir": tune_cache_folder(environ), **torchrun_settings(environ, given), **given}
        server_config, engine_config, model = make_configs(settings, values)
        log_to_stderr(server_config.log_level, engine_config.log_format)
        if links:
            log.info("ignored, since Kubernetes set them for a Service of this name: %s", ", ".join(links))
        if isinstance(model, Path):
            check_model_folder(model)
        if engine_config.node_rank > 0:
            from server.node import run_node

            engine_config = _with_files(engine_config, model, server_config.log_level)
            return run_node(engine_config, server_config.drain_timeout)
        with bind(server_config.host, server_config.port) as listener:
            engine_config = _with_files(engine_config, model, server_config.log_level)
            from server.service import run  # --help and a wrong flag need not wait for what it imports

            return run(server_config, engine_config, listener)
    except (SettingError, StartError) as error:
        line = json_line(logging.ERROR, log.name, str(error)) if log_format == "json" else f"{PROGRAM}: {error}"
        streams.write(sys.stderr, f"{line}\n")
        return USAGE_ERROR if is_command or isinstance(error, SettingError) else START_FAILED


def _asked_log_format(argv: Sequence[str], of_variable: str | None) -> str | None:
    """The log format that flags, which may be wrong, or the variable ask for."""
    flag = "--log-format"
    given = [after for word, after in pairwise(argv) if word == flag]
    given += [word.removeprefix(f"{flag}=") for word in argv if word.startswith(f"{flag}=")]
    return given[-1] if given else of_variable


def _with_files(config: EngineConfig, model: Path | HubModel, log_level: str) -> EngineConfig:
    """The config with the folder of a model on the hub, downloaded first if need be."""
    if isinstance(model, Path):
        return config
    needs: Needs = "tokenizer" if config.load_format == "dummy" else "weights"
    folder = download(model, needs=needs, log_level=log_level, log_format=config.log_format)
    return dataclasses.replace(config, model=folder)


def torchrun_settings(environ: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """What torchrun says when it starts this process: one process, and so one "host", for each rank.

    Raises:
        SettingError: it starts another number of ranks than the settings name.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return {}
    num_ranks = given.get("tensor_parallel_size", 1) * given.get("data_parallel_size", 1)
    if int(environ["WORLD_SIZE"]) != num_ranks:
        raise SettingError(
            f"torchrun starts {environ['WORLD_SIZE']} processes, but --tensor-parallel-size times "
            f"--data-parallel-size is {num_ranks}: they must be equal"
        )
    return {
        "nnodes": num_ranks,
        "node_rank": int(environ["RANK"]),
        "base_gpu_id": int(environ["LOCAL_RANK"]),
        "master_addr": environ["MASTER_ADDR"],
        "master_port": int(environ["MASTER_PORT"]),
    }


def _run_command(name: str, argv: Sequence[str], settings: Mapping[str, Setting], environ: Mapping[str, str]) -> int:
    """One of the commands beside serving; those that concern a service take its flags and variables too."""
    match name:
        case "bench":
            status = bench(argv, PROGRAM, environ)
        case "chat":
            status = chat(argv, PROGRAM, environ)
        case "completion":
            from server.completion import completion  # nothing else needs all parsers

            status = completion(argv, PROGRAM, settings, COMMANDS)
        case "doctor":
            from server.doctor.command import doctor  # it knows of moe's packages, and so imports torch
            from server.doctor.machine import Machine

            status = doctor(argv, PROGRAM, settings, Machine(environ=environ), tune_cache_folder(environ))
        case "experts":
            status = experts(argv, PROGRAM, settings, environ)
        case "explain":
            status = explain(argv, PROGRAM, settings, environ)
        case "health":
            status = health(argv, PROGRAM, settings, environ)
        case _:
            status = plan(argv, PROGRAM, settings, environ)
    return status


def all_settings() -> dict[str, Setting]:
    """Every setting by name. `model` is text, because a path would turn the folder `./x/y` into `x/y` on the hub."""
    settings = settings_of(EngineConfig, ServerConfig)
    return settings | {"model": dataclasses.replace(settings["model"], kind=str)}


def tune_cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Where tuned choices are kept without `--tune-cache-dir`, by the XDG rules; None for a user without a home."""
    base = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the rules say to ignore any other
        return Path(base) / "moe-serve" / "tune"
    home = environ.get("HOME", "")
    return Path(home) / ".cache" / "moe-serve" / "tune" if home else None
