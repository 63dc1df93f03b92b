"""`make_configs`: the dataclasses of the service from the values of its settings. `server.cli` gathers the values."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from server.config import ServerConfig
from server.errors import SettingError
from server.keys import keys_of
from server.model_source import HubModel, locate_model, served_name
from server.settings import Setting


def make_configs(
    settings: Mapping[str, Setting], values: Mapping[str, Any]
) -> tuple[ServerConfig, EngineConfig, Path | HubModel]:
    """Both dataclasses and the model; a model on the hub has no folder yet. Raises SettingError that names the flag."""
    model = locate_model(values.get("model"), values.get("revision"))
    values = {**values, "model": Path(model.name) if isinstance(model, HubModel) else model}
    if not values.get("served_model_name"):
        values["served_model_name"] = (served_name(model),)
    try:
        values |= keys_of(values)
        server_config = ServerConfig(**_fields_of(ServerConfig, values))
        engine_config = EngineConfig(**_fields_of(EngineConfig, values))
        return server_config, engine_config, model
    except ValueError as error:
        field = str(error).split(" ", 1)[0]
        raise SettingError(f"{settings[field].flag}: {error}" if field in settings else str(error)) from error


def _fields_of(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values}
