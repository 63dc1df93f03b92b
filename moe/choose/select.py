"""Chooses the backend of a path. Needs neither hardware nor weights. Backends choose their launch plans themselves."""

import logging
from dataclasses import dataclass, replace

import torch

from moe import registry
from moe.choose.ranking import rank_backends
from moe.config import DispatchFormat, MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.device import Device, arch_of
from moe.errors import UnsupportedPathError

logger = logging.getLogger(__name__)

Formats = tuple[DispatchFormat, ...] | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one backend can run a path: `reason` says why not, None if it can."""

    backend: MoeBackend
    hardware: str
    reason: str | None


def verdicts(
    device: Device,
    format_name: str,
    a2a: MoeA2ABackend,
    config: MoeRunnerConfig,
    dispatch_formats: Formats = None,
) -> list[Verdict]:
    """Every backend in the order in which `auto` tries them."""
    order = rank_backends(device, format_name, a2a, config).order
    return [_verdict(backend, device, format_name, a2a, config, dispatch_formats) for backend in order]


def _verdict(
    backend: MoeBackend,
    device: Device,
    format_name: str,
    a2a: MoeA2ABackend,
    config: MoeRunnerConfig,
    dispatch_formats: Formats,
) -> Verdict:
    if backend not in registry.BACKEND_MODULES:
        return Verdict(backend, "", "not built in yet")
    entry = registry.load_backend(backend)
    reason = entry.supports(device, format_name, a2a, config)
    formats = dispatch_formats or a2a.dispatch_formats
    missing = registry.missing_formats(backend, a2a, formats)
    if reason is None and missing:
        which = "" if len(missing) == len(formats) else f" for {', '.join(missing)}, which it may send"
        reason = f"no path from transport {a2a} is built in yet{which}"
    return Verdict(backend, entry.hardware, reason)


def choose_backend(
    requested: MoeBackend,
    device: Device | torch.device,
    format_name: str,
    a2a: MoeA2ABackend,
    config: MoeRunnerConfig,
    dispatch_formats: Formats = None,
    *,
    is_logged: bool = True,
) -> MoeBackend:
    """`requested` if it can run the path; for `auto` the first of `rank_backends` that can.

    For a `torch.device` of this machine, the backend's package and compiler must be here too; `auto` skips a backend
    that lacks one, with a warning if `is_logged`. For a `Device` only the hardware counts. `dispatch_formats` are
    those the transport may send (`--deepep-mode`); by default, all it supports.

    Raises:
        UnsupportedPathError: the requested backend cannot run the path, or none can. The message has the reasons and
            what would work.
    """
    is_here = not isinstance(device, Device)
    device = device if isinstance(device, Device) else probe_device(device)
    path = f"{format_name} experts on {device.arch} with --moe-a2a-backend {a2a}"
    if requested is not MoeBackend.AUTO:
        verdict = _verdict(requested, device, format_name, a2a, config, dispatch_formats)
        lack = registry.load_backend(requested).lacks() if is_here and verdict.reason is None else None
        if lack is not None:
            raise UnsupportedPathError(f"--moe-backend {requested} needs {lack}")
        if verdict.reason is None:
            return requested
        usable = [v.backend for v in verdicts(device, format_name, a2a, config, dispatch_formats) if v.reason is None]
        raise UnsupportedPathError(
            f"--moe-backend {requested} cannot run {path}: {verdict.reason}. "
            f"Usable for it: {', '.join(usable) or 'none'}."
        )
    table = verdicts(device, format_name, a2a, config, dispatch_formats)
    for index, verdict in enumerate(table):
        if verdict.reason is not None:
            continue
        lack = registry.load_backend(verdict.backend).lacks() if is_here else None
        if lack is not None:
            reason = f"it needs {lack}"
            if is_logged:
                source = rank_backends(device, format_name, a2a, config).source_of(verdict.backend)
                logger.warning(
                    "--moe-backend auto passes over %s, because %s; it comes first by %s",
                    verdict.backend, reason, source,
                )  # fmt: skip
            table[index] = replace(verdict, reason=reason)
            continue
        return verdict.backend
    reasons = "\n".join(f"  {verdict.backend}: {verdict.reason}" for verdict in table)
    raise UnsupportedPathError(f"no backend can run {path}:\n{reasons}")


def probe_device(device: torch.device) -> Device:
    """The `Device` of a torch device, for `supports`.

    Raises:
        UnsupportedPathError: the device is not on this machine, or it is neither "cpu" nor "cuda".
    """
    if device.type == "cpu":
        return Device(arch="cpu")
    if device.type != "cuda":
        raise UnsupportedPathError(f"--device {device} is not supported: use cpu or cuda")
    if not torch.cuda.is_available():
        raise UnsupportedPathError(f"--device {device}: torch sees no GPU here; use --device cpu")
    return Device(arch=arch_of(device))
