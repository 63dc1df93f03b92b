"""`moe-serve doctor`: the command. Serves nothing, downloads nothing, changes nothing on the machine."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.config import EngineConfig
from server import streams
from server.configs import make_configs
from server.doctor import service
from server.doctor.finding import Finding, is_well, render, verdict
from server.doctor.gpus import gpu_findings, infiniband
from server.doctor.machine import Machine
from server.doctor.packages import examine_packages, nccl, nvshmem, package_findings
from server.doctor.paths import arch_of, path_findings
from server.doctor.system import cache_findings, compiler, locked_memory, open_files, shared_memory
from server.model_source import HubModel
from server.settings import Parser, Setting, given_values

_DESCRIPTION = (
    "What of this machine keeps the service with these flags from serving, or slows it down, and what to do about it: "
    "drivers, packages, links between GPUs, limits, folders, and what each path would need."
)
_EPILOG = (
    "Exit status, that of the service: 0 if nothing keeps it from serving, 2 if flags or the files that they name do, "
    "else 1. Notes say what optional parts are not here. All flags of the service are taken."
)
PROBLEM, WRONG_SETTING = 1, 2


def make_parser(program: str) -> Parser:
    """The flags of `moe-serve doctor` itself."""
    parser = Parser(
        prog=f"{program} doctor",
        usage="%(prog)s [--json] [flags of the service]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def doctor(
    argv: Sequence[str], program: str, settings: Mapping[str, Setting], machine: Machine, tune_cache: Path | None
) -> int:
    """Print all findings; returns the exit status. Raises SettingError for a wrong flag or variable.

    `tune_cache` is where tuned choices are kept unless a flag says otherwise.
    """
    parser = make_parser(program)
    own, flags = parser.parse_known_args(argv)
    given = given_values(settings, parser, flags, machine.environ)
    values = {"tune_cache_dir": tune_cache, **given}
    server_config, config, model = make_configs(settings, values)
    findings = examine(machine, config, downloads=isinstance(model, HubModel), model=model)
    findings[:0] = [service.port(server_config.host, server_config.port), *service.http_findings(server_config)]
    if own.json:
        shown = {"well": is_well(findings), "findings": [dataclasses.asdict(each) for each in findings]}
        streams.say(json.dumps(shown, indent=1) + "\n")
    else:
        streams.say(f"{render(findings)}\n{verdict(findings)}")
    if any(each.is_setting for each in findings):
        return WRONG_SETTING
    return 0 if is_well(findings) else PROBLEM


def examine(
    machine: Machine, config: EngineConfig, *, downloads: bool, model: Path | HubModel | None = None
) -> list[Finding]:
    """All findings but those of HTTP. `downloads`: the model comes from the hub. Without a model, none of it."""
    packages = examine_packages(machine)
    torch = packages["torch"]
    has_gpu = config.device != "cpu" and bool(torch.facts.get("num_gpus"))
    return [
        *([] if model is None else service.model_findings(model, config, torch, arch_of(config, torch))),
        *gpu_findings(machine, config, torch),
        *package_findings(packages, config),
        nvshmem(machine, config),
        nccl(torch, config),
        infiniband(machine, config),
        compiler(machine, has_gpu=has_gpu),
        open_files(machine, config),
        locked_memory(machine, config),
        shared_memory(machine, config),
        *cache_findings(machine, config.tune_cache_dir, has_gpu=has_gpu, downloads=downloads, tunes=config.tune),
        *path_findings(packages, config),
    ]
