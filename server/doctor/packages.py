"""Packages: torch, which everything needs, and those of single paths. They are imported in a process of their own."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.process import describe_exit
from moe.packages import SOURCES, TRANSPORT_PACKAGES
from server.doctor import probe
from server.doctor.finding import Finding, Level, ok
from server.doctor.machine import Machine, Outcome

_TORCH = "pip install torch, as https://pytorch.org/get-started/locally says for this machine"


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package as the probe found it: `version` if it can be imported, `error` if it is here and cannot."""

    name: str
    version: str | None = None
    error: str | None = None
    facts: Mapping[str, Any]

    @property
    def is_missing(self) -> bool:
        """Whether it is not installed at all."""
        return self.version is None and self.error is None


def examine_packages(machine: Machine) -> dict[str, Package]:
    """Torch and every optional package, by the name it is imported under."""
    found: dict[str, Package] = {}
    names = ["torch", *SOURCES]
    while names:
        outcome = machine.run(sys.executable, "-P", str(Path(probe.__file__)), *names)
        lines = [] if outcome is None else outcome.out.splitlines()
        for line in lines:
            if line.startswith('{"package": '):
                facts = json.loads(line)
                name = facts.pop("package")
                found[name] = Package(
                    name=name, version=facts.pop("version", None), error=facts.pop("error", None), facts=facts
                )
                names.remove(name)
        if names:  # the first of them has ended the probe
            name = names.pop(0)
            found[name] = Package(name=name, error=f"the process that imported it {_end_of(outcome)}", facts={})
    return found


def _end_of(outcome: Outcome | None) -> str:
    if outcome is None:
        return f"cannot be started: {sys.executable}"
    return "hung" if outcome.status is None else describe_exit(outcome.status)


def package_findings(packages: Mapping[str, Package], config: EngineConfig) -> list[Finding]:
    """A finding for each package. One that the flags ask for must work; any other is optional."""
    asked = {TRANSPORT_PACKAGES.get(config.moe_a2a_backend), config.moe_backend, config.moe_backend.partition("_")[0]}
    has_gpu = bool(packages["torch"].facts.get("num_gpus"))
    return [
        _package_finding(each, is_asked=each.name in asked or each.name == "torch", has_gpu=has_gpu)
        for each in packages.values()
    ]


def _package_finding(package: Package, *, is_asked: bool, has_gpu: bool) -> Finding:
    name, source = package.name, SOURCES.get(package.name, _TORCH)
    if package.version is not None:
        build = package.facts.get("cuda") or package.facts.get("hip")
        return ok(name, package.version if name != "torch" else f"{package.version}, built for {build or 'CPUs'}")
    is_of_use = not package.is_missing or (name == "triton" and has_gpu)
    level = Level.PROBLEM if is_asked else Level.WARNING if is_of_use else Level.NOTE
    if package.is_missing:
        return Finding(topic=name, level=level, text="is not installed", way_out=source)
    text = f"cannot be imported: {package.error}"
    if package.facts.get("lacks_folder"):
        way_out = "set HOME, or what the lines of the caches name, to a folder that can be written"
        return Finding(topic=name, level=level, text=text, way_out=way_out)
    return Finding(topic=name, level=level, text=text, way_out=f"install it again: {source}")


def nvshmem(machine: Machine, config: EngineConfig) -> Finding:
    """The library that DeepEP's kernels need between hosts and in low-latency mode."""
    folder = machine.environ.get("NVSHMEM_DIR")
    if folder is not None and not (machine.root / folder.lstrip("/")).is_dir():
        return Finding(
            topic="NVSHMEM",
            level=Level.WARNING if config.moe_a2a_backend == "deepep" else Level.NOTE,
            text=f"NVSHMEM_DIR is {folder}, which is no folder",
            way_out="name the folder where NVSHMEM is installed, or remove the variable",
        )
    if folder is not None:
        return ok("NVSHMEM", f"in {folder}, as NVSHMEM_DIR says")
    for each in distributions(path=_search_path(machine)):
        if each.name and each.name.startswith("nvidia-nvshmem"):
            return ok("NVSHMEM", f"{each.version}, package {each.name}")
    return Finding(
        topic="NVSHMEM",
        level=Level.WARNING if config.moe_a2a_backend == "deepep" else Level.NOTE,
        text="is not installed; only the transport deepep needs it",
        way_out="pip install nvidia-nvshmem-cu13, or nvidia-nvshmem-cu12 for CUDA 12",
    )


def _search_path(machine: Machine) -> list[str]:
    return [*filter(None, machine.environ.get("PYTHONPATH", "").split(":")), *sys.path]


def nccl(torch: Package, config: EngineConfig) -> Finding:
    """The library of the collectives between GPUs; torch brings it."""
    version, error = torch.facts.get("nccl"), torch.facts.get("nccl_error")
    if version is not None:
        return ok("NCCL", f"{version}, in torch")
    text = "this torch has none" if error is None else f"cannot be used: {error}"
    if config.num_ranks == 1 or not torch.facts.get("num_gpus"):
        return Finding(topic="NCCL", level=Level.NOTE, text=f"{text}; only several ranks on GPUs need it")
    text = f"{text}; {config.num_ranks} ranks cannot talk to each other"
    return Finding(topic="NCCL", level=Level.PROBLEM, text=text, way_out=_TORCH)
