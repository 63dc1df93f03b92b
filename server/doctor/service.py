"""The service itself: whether its port is free, and whether its model is a checkpoint that it can load."""

import dataclasses
from pathlib import Path

from engine.config import EngineConfig
from server.doctor.finding import Finding, Level, ok
from server.doctor.packages import Package
from server.errors import SettingError
from server.listener import bind
from server.model_source import HubModel, check_model_folder


def port(host: str, number: int) -> Finding:
    """Whether the service could listen there now. Takes the port for a moment."""
    try:
        bind(host, number).close()
    except SettingError as error:
        flag, _, reason = str(error).partition(": ")
        text, _, way_out = reason.partition("; ")
        default = "choose another --host; 0.0.0.0 stands for all addresses"
        return Finding(topic="address", level=Level.PROBLEM, text=text, way_out=way_out or f"{default} ({flag})")
    return ok("address", f"{host}:{number} is free" if number else f"{host}, and a port that is free then")


def model(place: Path | HubModel, config: EngineConfig, torch: Package) -> Finding:
    """Whether the folder holds a model that the service knows, by its config.json and the headers of its weights."""
    if isinstance(place, HubModel):
        return ok("model", f"{place} comes from the Hugging Face hub, or from its cache")
    try:
        check_model_folder(place)
        if torch.version is not None:
            _read_headers(place, config)
    except ValueError as error:  # every package's error tree begins there
        text = str(error).removeprefix("--model: ").splitlines()[0]
        way_out = "give another --model, or complete this one: docs/troubleshooting.md has the message"
        return Finding(topic="model", level=Level.PROBLEM, text=text, way_out=way_out)
    return ok("model", f"{place} is a checkpoint that the service knows; its weights are not read here")


def _read_headers(folder: Path, config: EngineConfig) -> None:
    # Imports torch, which the caller has found to work.
    from engine.plan import plan_engine

    plain = EngineConfig(model=folder)
    plan_engine(dataclasses.replace(plain, device="cpu", load_format=config.load_format), None)
