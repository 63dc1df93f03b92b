"""In which order `auto` tries the backends: by what was measured on the GPU, else by a rule. Measures nothing.

A shape that nobody measured takes the order of the measured one whose experts are nearest to it in size.
"""

import math
from dataclasses import dataclass

from moe.backends.base import Device
from moe.config import MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.tables import read_entries, size_distance

TABLE = "backends.json"

# The rule, best first: kernel libraries before our own kernels and those before plain torch; within the libraries the
# one with the narrowest hardware goes first. Measurements overrule it.
PREFERENCE: tuple[MoeBackend, ...] = (
    MoeBackend.FLASHINFER_TRTLLM,
    MoeBackend.FLASHINFER_CUTEDSL,
    MoeBackend.FLASHINFER_MXFP4,
    MoeBackend.DEEP_GEMM,
    MoeBackend.FLASHINFER_CUTLASS,
    MoeBackend.AITER,
    MoeBackend.TRITON,
    MoeBackend.TORCH,
)
RULE = "the order of preference in moe/ranking.py; nobody measured this format on this GPU"


@dataclass(frozen=True, slots=True)
class Ranking:
    """Every backend, best first, and where that order comes from."""

    order: tuple[MoeBackend, ...]
    source: str


def rank_backends(device: Device, format_name: str, a2a: MoeA2ABackend, config: MoeRunnerConfig) -> Ranking:
    """The order for one path. Backends that were not measured keep their places of the rule."""
    path = (device.arch, format_name, a2a)
    entries = [entry for entry in read_entries(TABLE) if (entry["gpu"], entry["format"], entry["a2a"]) == path]
    if not entries:
        return Ranking(PREFERENCE, RULE)
    entry = min(entries, key=lambda entry: _distance(entry["shape"], config))
    shape = entry["shape"]
    source = f"moe/tables/{TABLE}: {entry['card']}, {entry['source']}"
    if not _is_measured(shape, config):
        source += (
            f"; nearest measured shape: {shape['num_experts']} experts of {shape['hidden_size']} x "
            f"{shape['intermediate_size']}, top-{shape['top_k']}"
        )
    return Ranking(_reordered(entry["microseconds"]), source)


def _distance(shape: dict[str, int], config: MoeRunnerConfig) -> tuple[float, bool]:
    """By the experts' sizes; of equal ones the shape that agrees in every number is nearer."""
    return size_distance(shape, config.hidden_size, config.intermediate_size), not _is_measured(shape, config)


def _is_measured(shape: dict[str, int], config: MoeRunnerConfig) -> bool:
    return all(getattr(config, name) == size for name, size in shape.items())


def _reordered(microseconds: dict[str, dict[str, float]]) -> tuple[MoeBackend, ...]:
    """The rule's order with the measured backends sorted among their own places, by geometric mean over tokens."""

    def mean(backend: MoeBackend) -> float:
        return math.fsum(math.log(time) for time in microseconds[backend].values())

    measured = [backend for backend in PREFERENCE if backend in microseconds]
    fastest_first = iter(sorted(measured, key=mean))
    return tuple(next(fastest_first) if backend in microseconds else backend for backend in PREFERENCE)
