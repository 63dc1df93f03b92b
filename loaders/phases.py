"""`StartPhases`: what a start is doing, how far it is, and how long each phase took. Logs; knows no model, no torch.

Phases may be nested: while an inner one runs, the clock of the outer one stands still, so the seconds of all phases add
up to the whole start. A layer is read, processed and checked before the next, so these phases alternate; each ends,
and gets its log line, with its last layer.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

_log = logging.getLogger(__name__)
_GIB = 2**30


class Phase(StrEnum):
    """The phases of a start, about in their order."""

    STARTING = "starting"  # imports, the device's context, and whatever is no other phase
    MEETING = "meeting ranks"  # of other hosts
    HEADERS = "reading headers"
    WEIGHTS = "loading weights"
    PROCESSING = "processing weights"
    TUNING = "tuning"
    SELF_CHECK = "self-check"
    WARM_UP = "warming up"
    GRAPHS = "capturing graphs"
    READY = "ready"


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """One phase so far: `done` of `total` steps (0 of 0 where there are none to count) and its own seconds.

    `num_bytes` were read in it; `hidden_s` is the time that reading took in a thread while other phases ran.
    """

    phase: str
    seconds: float
    done: int = 0
    total: int = 0
    num_bytes: int = 0
    hidden_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """How fast the phase read; 0 if it read nothing."""
        busy_s = self.seconds + self.hidden_s
        return self.num_bytes / busy_s if busy_s > 0 else 0.0

    def describe(self) -> str:
        """Such as "loading weights 4.9 s (24 of 24, 12.8 GiB at 2.6 GiB/s)"."""
        notes = []
        if self.total:
            notes.append(f"{self.done} of {self.total}")
        if self.num_bytes:
            notes.append(f"{self.num_bytes / _GIB:.2f} GiB at {self.bytes_per_s / _GIB:.2f} GiB/s")
        if self.hidden_s >= 0.05:
            notes.append(f"{self.hidden_s:.1f} s more beside other phases")
        return f"{self.phase} {self.seconds:.1f} s" + (f" ({', '.join(notes)})" if notes else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class StartProgress:
    """A moment of a start: the phase that runs now, with its steps, and all phases that have begun, in that order.

    `waits_for` is who else is missing, in words, while ranks meet.
    """

    phase: str
    done: int
    total: int
    elapsed_s: float
    phases: list[PhaseTime]
    waits_for: str | None = None


@dataclass(slots=True)
class _Counts:
    seconds: float = 0.0
    done: int = 0
    total: int = 0
    num_bytes: int = 0
    hidden_s: float = 0.0


class StartPhases:
    """The record of one start. One thread enters phases; any thread may ask for `progress`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """The start begins now, in the phase `STARTING`. `clock` returns seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._begin_s = self._since_s = clock()
        self._end_s: float | None = None
        self._stack = [Phase.STARTING]
        self._counts = {Phase.STARTING: _Counts()}
        self._waits_for: str | None = None

    @contextmanager
    def phase(self, phase: Phase, total: int = 0) -> Iterator[None]:
        """A phase of its own, of `total` steps that `advance` counts. It is logged at the end of the block."""
        with self._inside(phase, total):
            yield
        self._log_end(phase)

    @contextmanager
    def step_of(self, phase: Phase, total: int) -> Iterator[None]:
        """One of the `total` steps of a phase that alternates with others. It is logged after the last."""
        with self._inside(phase, total):
            yield
        self.advance(phase)
        if self._counts[phase].done >= total:
            self._log_end(phase)

    def advance(self, phase: Phase, steps: int = 1, *, num_bytes: int | None = None, hidden_s: float = 0.0) -> None:
        """Count steps of a phase that has begun, and reading time beside other phases.

        `num_bytes` is what the phase has read so far, not the addition.
        """
        with self._lock:
            counts = self._counts[phase]
            counts.done += steps
            counts.num_bytes = counts.num_bytes if num_bytes is None else num_bytes
            counts.hidden_s += hidden_s

    def wait_for(self, phase: Phase, done: int, whom: str | None) -> None:
        """So many steps of a phase are done now; the others wait for `whom`, None if they need not wait."""
        with self._lock:
            self._counts[phase].done, self._waits_for = done, whom

    def finish(self) -> None:
        """Everything is done: the phase is `READY`, its time stands still, and one log line sums up the start."""
        self._switch(lambda: self._stack.__setitem__(slice(None), [Phase.READY]))
        with self._lock:
            self._end_s = self._since_s
        progress = self.progress()
        listed = ", ".join(each.describe() for each in progress.phases)
        _log.info("ready after %.1f s: %s", progress.elapsed_s, listed)

    def progress(self) -> StartProgress:
        """Where the start is at this moment."""
        with self._lock:
            now_s = self._clock() if self._end_s is None else self._end_s
            current = self._stack[-1]
            phases = [self._time(phase, now_s) for phase in self._counts]
            counts = self._counts.get(current, _Counts())
            return StartProgress(
                phase=current, done=counts.done, total=counts.total, elapsed_s=now_s - self._begin_s, phases=phases,
                waits_for=self._waits_for,
            )  # fmt: skip

    def _time(self, phase: Phase, now_s: float) -> PhaseTime:
        counts = self._counts[phase]
        running_s = now_s - self._since_s if phase is self._stack[-1] else 0.0
        return PhaseTime(
            phase=phase, seconds=counts.seconds + running_s, done=counts.done, total=counts.total,
            num_bytes=counts.num_bytes, hidden_s=counts.hidden_s,
        )  # fmt: skip

    @contextmanager
    def _inside(self, phase: Phase, total: int) -> Iterator[None]:
        self._switch(lambda: self._stack.append(phase))
        with self._lock:
            self._counts.setdefault(phase, _Counts()).total = total
        try:
            yield
        finally:
            self._switch(self._stack.pop)

    def _switch(self, change: Callable[[], object]) -> None:
        """Book the time so far to the phase that ran, then change the stack."""
        with self._lock:
            now_s = self._clock()
            self._counts.setdefault(self._stack[-1], _Counts()).seconds += now_s - self._since_s
            self._since_s = now_s
            change()

    def _log_end(self, phase: Phase) -> None:
        with self._lock:
            ended = self._time(phase, self._clock())
        _log.info("%s", ended.describe())
