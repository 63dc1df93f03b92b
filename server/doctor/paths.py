"""What each way to compute experts, and each transport, would need on this machine."""

from collections.abc import Mapping

from engine.config import EngineConfig
from moe.packages import TRANSPORT_PACKAGES, not_installed
from server.doctor.finding import Finding, Level, ok
from server.doctor.packages import Package


def path_findings(packages: Mapping[str, Package], config: EngineConfig) -> list[Finding]:
    """A finding for each `--moe-backend` and each `--moe-a2a-backend`; none while torch cannot be imported."""
    if packages["torch"].version is None:
        return []
    return [*_backends(packages, config), *_transports(packages, config)]


def arch_of(config: EngineConfig, torch: Package) -> str | None:
    """The architecture that the service would run on, such as "sm90" or "cpu"; None if it is not known."""
    if config.device == "cpu" or (config.device == "auto" and not torch.facts.get("num_gpus")):
        return "cpu"
    return torch.facts.get("arch")


def _backends(packages: Mapping[str, Package], config: EngineConfig) -> list[Finding]:
    # Imports torch, which the caller has found to work.
    from moe.registry import BACKEND_MODULES, load_backend

    findings = []
    arch = arch_of(config, packages["torch"])
    for name in BACKEND_MODULES:
        backend = load_backend(name)
        broken = None if backend.package is None else _broken(packages[backend.package])
        lacks = broken or backend.lacks()
        topic = f"--moe-backend {name}"
        formats = backend.formats.items()
        is_asked = config.moe_backend == name
        if is_asked and arch and all(backend.unsupported_arch(arch, *each) for each in formats):
            text = f"does not run on {arch}; runs on {backend.hardware}"
            way_out = "take --moe-backend auto, or another --device"
            findings.append(Finding(topic=topic, level=Level.PROBLEM, text=text, way_out=way_out))
        elif lacks is None:
            findings.append(ok(topic, f"nothing is missing; runs on {backend.hardware}"))
        else:
            findings.append(_missing(topic, lacks, is_asked=is_asked))
    return findings


def _transports(packages: Mapping[str, Package], config: EngineConfig) -> list[Finding]:
    findings = []
    for name, package in TRANSPORT_PACKAGES.items():
        topic = f"--moe-a2a-backend {name}"
        found = packages[package]
        lacks = not_installed(package) if found.is_missing else _broken(found)
        if lacks is None:
            findings.append(ok(topic, f"its package {package} can be imported"))
        else:
            findings.append(_missing(topic, lacks, is_asked=config.moe_a2a_backend == name))
    return findings


def _broken(package: Package) -> str | None:
    return None if package.error is None else f"{package.name}, which cannot be imported: its line above says why"


def _missing(topic: str, lacks: str, *, is_asked: bool) -> Finding:
    what, _, way_out = lacks.partition(": ")
    level = Level.PROBLEM if is_asked else Level.NOTE
    return Finding(topic=topic, level=level, text=f"needs {what}", way_out=way_out)
