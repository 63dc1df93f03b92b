"""The service itself: whether its port is free, whether it can load its model, and whether its flags go together."""

import dataclasses
from pathlib import Path

from engine.config import EngineConfig
from server.config import ServerConfig
from server.doctor.finding import Finding, Level, ok
from server.doctor.packages import Package
from server.errors import SettingError, StartError
from server.listener import bind
from server.model_files import read_model_files
from server.model_source import HubModel, check_model_folder
from server.responses.store import check_store
from server.service import check_certificate, check_tracing


def port(host: str, number: int) -> Finding:
    """Whether the service could listen there now. Takes the port for a moment."""
    try:
        bind(host, number).close()
    except (SettingError, StartError) as error:
        flag, _, reason = str(error).partition(": ")
        text, _, way_out = reason.partition("; ")
        default = "choose another --host; 0.0.0.0 stands for all addresses"
        return Finding(
            topic="address",
            level=Level.PROBLEM,
            text=text,
            way_out=way_out or f"{default} ({flag})",
            is_setting=isinstance(error, SettingError),
        )
    return ok("address", f"{host}:{number} is free" if number else f"{host}, and a port that is free then")


def http_findings(config: ServerConfig) -> list[Finding]:
    """Whether certificate and file of answers can be used, and spans be sent; nothing of what no flag asks for."""
    findings = []
    for topic, is_asked, check, text_if_ok in (
        ("certificate", config.ssl_certfile is not None, check_certificate, "can be used"),
        ("traces", config.otlp_endpoint is not None, check_tracing, "the packages are here"),
        ("answers", config.response_store is not None, check_store, f"{config.response_store} can be used"),
    ):
        if not is_asked:
            continue
        try:
            check(config)
        except SettingError as error:
            text, _, way_out = str(error).partition(": ")
            findings.append(Finding(topic=topic, level=Level.PROBLEM, text=text, way_out=way_out, is_setting=True))
        else:
            findings.append(ok(topic, text_if_ok))
    return findings


def model_findings(place: Path | HubModel, config: EngineConfig, torch: Package, arch: str | None) -> list[Finding]:
    """Whether the model is one that the service knows, and whether the flags fit it on a device of this `arch`.

    The headers of a large checkpoint take a while, so they are read once if all is well. Otherwise reading them again
    with plain flags tells what is wrong, the checkpoint or the flags.
    """
    if isinstance(place, HubModel):
        return [ok("model", f"{place} comes from the Hugging Face hub, or from its cache")]
    config = dataclasses.replace(config, model=place)
    if torch.version is None or arch is None:
        return [model(config, torch)]
    fit = flags(config, arch)
    found = model(config, torch, knows_headers=fit.level is Level.OK)
    return [found, fit] if found.level is Level.OK else [found]


def model(config: EngineConfig, torch: Package, *, knows_headers: bool = False) -> Finding:
    """Whether the folder holds a model that the service knows, by its small files and the headers of its weights.

    `knows_headers`: they were read before, and are fine.
    """
    try:
        check_model_folder(config.model)
        read_model_files(config.model)
        if torch.version is not None and not knows_headers:
            _read_headers(config)
    except ValueError as error:  # every package's error tree begins there
        text = str(error).removeprefix("--model: ").splitlines()[0]
        way_out = "give another --model, or complete this one: docs/troubleshooting.md has the message"
        return Finding(topic="model", level=Level.PROBLEM, text=text, way_out=way_out, is_setting=True)
    return ok("model", f"{config.model} is a checkpoint that the service knows; its weights are not read here")


def _read_headers(config: EngineConfig) -> None:
    # Imports torch, which the caller has found to work.
    from engine.plan import plan_engine

    plan_engine(EngineConfig(model=config.model, device="cpu", load_format=config.load_format), None)


def flags(config: EngineConfig, arch: str) -> Finding:
    """Whether the flags and the model go together: backend, transport, number format, context, parallel sizes."""
    import torch

    from engine.model_settings import make_model_settings
    from engine.plan import check_fits_cpu
    from model.sizes import measure_model
    from moe.device import Device

    try:
        if arch == "cpu":
            check_fits_cpu(config)
        else:
            settings = make_model_settings(config, torch.device("cuda"))
            config.context_of(measure_model(config.model, settings, Device(arch=arch)).max_model_len)
    except ValueError as error:
        way_out = "change the flag; docs/troubleshooting.md has the message"
        text = "; ".join(str(error).rstrip(".").splitlines())
        return Finding(topic="flags", level=Level.PROBLEM, text=text, way_out=way_out, is_setting=True)
    return ok("flags", f"fit the model on {arch}")
