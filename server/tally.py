"""What the HTTP side counts, for the service as a whole: counters that only grow, and gauges.

`OwnTally` is that of a single HTTP process. `server.board` has the one that several processes share.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from server.key_limits import KeyMemory


class Gauge(IntEnum):
    """Numbers that go up and down with what a process does now."""

    IN_FLIGHT = 0  # requests being served
    LARGE_BODIES = 1  # large request bodies that are read, or wait to be
    CLOSED = 2  # connections that the process was given and that have ended
    READY = 3  # 1 once the engine has told the process that it is ready


class Tally(Protocol):
    """One process adds to its own numbers and reads those of all."""

    started_s: float
    """When the service began to count, as seconds since the epoch."""

    def add(self, key: str, amount: float) -> None:
        """Add to a counter; the first call makes it. Keys are few: they come from served names and routes."""

    def totals(self) -> Mapping[str, float]:
        """All counters by key, summed over all processes, those that have ended too."""

    def set_gauge(self, gauge: Gauge, value: int) -> None:
        """Set this process's part."""

    def sum_gauge(self, gauge: Gauge) -> int:
        """Sum over the processes that run."""


class OwnTally:
    """Numbers of one process, in its own memory."""

    def __init__(self) -> None:
        self.started_s = time.time()
        self._counters: dict[str, float] = {}
        self._gauges = [0] * len(Gauge)

    def add(self, key: str, amount: float) -> None:
        """Add to a counter."""
        self._counters[key] = self._counters.get(key, 0.0) + amount

    def totals(self) -> Mapping[str, float]:
        """All counters."""
        return self._counters

    def set_gauge(self, gauge: Gauge, value: int) -> None:
        """Set a gauge."""
        self._gauges[gauge] = value

    def sum_gauge(self, gauge: Gauge) -> int:
        """The gauge."""
        return self._gauges[gauge]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """What HTTP processes of one service share.

    `turn` is held while a large body is read, by one process at a time. `num_held_by_client` returns the places that
    each client holds at the engine. `key_memory` has what API keys use.
    """

    tally: Tally
    turn: AbstractContextManager[object]
    num_held_by_client: Callable[[], Mapping[str, int]]
    key_memory: "KeyMemory"
