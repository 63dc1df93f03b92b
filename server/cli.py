"""The command `moe-serve`: the only place that reads argv and the environment. Starts what `server.run` runs."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from server.config import ServerConfig
from server.errors import SettingError
from server.explain import explain
from server.listener import bind
from server.settings import Setting, gather, make_parser, settings_of
from server.version import service_version

PROGRAM = "moe-serve"
USAGE_ERROR = 2
INTERRUPTED = 130
_DESCRIPTION = "Serve a mixture-of-experts model behind the OpenAI HTTP API."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0 after a clean stop, 1 if the engine failed, 2 for a wrong setting."""
    argv = sys.argv[1:] if argv is None else argv
    settings = settings_of(ServerConfig, EngineConfig)
    try:
        if argv[:1] == ["explain"]:
            return explain(argv[1:], PROGRAM, bundled_model())
        flags = vars(make_parser(settings, PROGRAM, _DESCRIPTION).parse_args(argv))
        if flags.get("version"):
            sys.stdout.write(f"{PROGRAM} {service_version()}\n")
            return 0
        values = {"tune_cache_dir": tune_cache_folder(os.environ), **gather(settings, flags, os.environ)}
        server_config, engine_config = make_configs(settings, values)
        check_model_folder(engine_config.model)
        with bind(server_config.host, server_config.port) as listener:
            from server.run import run  # --help and a wrong flag need not wait for what it imports

            return run(server_config, engine_config, listener)
    except SettingError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return USAGE_ERROR
    except KeyboardInterrupt:  # before the service has begun; then it drains
        return INTERRUPTED


def make_configs(settings: Mapping[str, Setting], values: Mapping[str, Any]) -> tuple[ServerConfig, EngineConfig]:
    """Both dataclasses. Raises SettingError that names the flag."""
    values = {"model": bundled_model(), **values}
    if not values.get("served_model_name"):
        values["served_model_name"] = (values["model"].resolve().name,)
    try:
        return ServerConfig(**_fields_of(ServerConfig, values)), EngineConfig(**_fields_of(EngineConfig, values))
    except ValueError as error:
        field = str(error).split(" ", 1)[0]
        raise SettingError(f"{settings[field].flag}: {error}" if field in settings else str(error)) from error


def _fields_of(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values}


def bundled_model() -> Path:
    """The model that is served without `--model`: in `assets` of a checkout, inside this package when installed."""
    package = Path(__file__).resolve().parent
    checkout = package.parent / "assets" / "tiny-gpt-oss"
    return checkout if checkout.is_dir() else package / "bundled" / "tiny-gpt-oss"


def tune_cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Where tuned choices are kept without `--tune-cache-dir`, by the XDG rules; None for a user without a home."""
    base = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the rules say to ignore any other
        return Path(base) / "moe-serve" / "tune"
    home = environ.get("HOME", "")
    return Path(home) / ".cache" / "moe-serve" / "tune" if home else None


def check_model_folder(folder: Path) -> None:
    """Raise SettingError unless the folder looks like a checkpoint; what is inside is the loader's business."""
    if not folder.exists():
        raise SettingError(f"--model: {folder} does not exist; give the folder of a checkpoint, or leave --model out")
    if not folder.is_dir():
        raise SettingError(f"--model: {folder} is a file; give the folder that holds config.json and the weights")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise SettingError(f"--model: {folder} is no checkpoint, it has no {name}; give a folder that has one")


if __name__ == "__main__":
    sys.exit(main())
