"""The order in which `auto` tries the backends: measured ones from the fastest on, then the others by a rule.

A shape without measurements takes the order of the measured shape nearest in expert size. Nothing is measured here.
"""

import math
from dataclasses import dataclass

from moe.config import MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.device import Device
from moe.registry import BACKEND_MODULES, load_backend
from moe.tables import read_entries, size_distance

TABLE = "backends.json"

RULE = "the order of preference (each backend's auto_order)"


def preference() -> tuple[MoeBackend, ...]:
    """All backends by `auto_order`, the order for backends without measurements.

    Kernel libraries come first, then our own kernels, then plain torch. Among the libraries, the one that supports the
    fewest kinds of GPU comes first.
    """
    return tuple(sorted(BACKEND_MODULES, key=lambda backend: (load_backend(backend).auto_order, backend)))


@dataclass(frozen=True, slots=True)
class Ranking:
    """Every backend, best first. `source` names the table behind the `measured` ones; None if there are none."""

    order: tuple[MoeBackend, ...]
    measured: tuple[MoeBackend, ...] = ()
    source: str | None = None

    def source_of(self, backend: MoeBackend) -> str:
        """What decided a backend's rank: the table or the rule."""
        if self.source is None:
            return f"{RULE}; nobody measured this format on this GPU"
        if backend not in self.measured:
            return f"{RULE}; nobody measured {backend} on this GPU"
        return self.source


def rank_backends(device: Device, format_name: str, a2a: MoeA2ABackend, config: MoeRunnerConfig) -> Ranking:
    """The order for one path. Backends without measurements come after those with."""
    path = (device.arch, format_name, a2a)
    entries = [entry for entry in read_entries(TABLE) if (entry["gpu"], entry["format"], entry["a2a"]) == path]
    if not entries:
        return Ranking(preference())
    entry = min(entries, key=lambda entry: _distance(entry["shape"], config))
    shape = entry["shape"]
    source = f"moe/tables/{TABLE}: {entry['card']}, {entry['source']}"
    if not _is_measured(shape, config):
        source += (
            f"; nearest measured shape: {shape['num_experts']} experts of {shape['hidden_size']} x "
            f"{shape['intermediate_size']}, top-{shape['top_k']}"
        )
    measured = _fastest_first(entry["microseconds"])
    rest = tuple(backend for backend in preference() if backend not in measured)
    return Ranking(measured + rest, measured, source)


def _distance(shape: dict[str, int], config: MoeRunnerConfig) -> tuple[float, bool]:
    """Sort key: distance in expert size, then whether any number of the shape differs."""
    return size_distance(shape, config.hidden_size, config.intermediate_size), not _is_measured(shape, config)


def _is_measured(shape: dict[str, int], config: MoeRunnerConfig) -> bool:
    return all(getattr(config, name) == size for name, size in shape.items())


def _fastest_first(microseconds: dict[str, dict[str, float]]) -> tuple[MoeBackend, ...]:
    """Backends by geometric mean of their times over token counts; the rule breaks ties."""

    def mean(backend: MoeBackend) -> float:
        return math.fsum(math.log(time) for time in microseconds[backend].values())

    return tuple(sorted((backend for backend in preference() if backend in microseconds), key=mean))
