"""`StallWatch`: notices an engine whose loop still turns but computes nothing. The heartbeat does not show that."""

import logging
import time
from collections.abc import Callable
from enum import StrEnum

from server.request_group import Engine

log = logging.getLogger(__name__)


class StallReason(StrEnum):
    """What holds up requests that get no token."""

    NO_PAGES = "no_pages"  # they wait, and all KV pages are in use
    NOT_ADMITTED = "not_admitted"  # they wait, though pages are free
    NO_TOKEN = "no_token"  # some run


class StallWatch:
    """A stall: requests wait or run, and for `timeout_s` seconds not one token of prompt or answer is computed."""

    def __init__(
        self, engine: Engine, timeout_s: float, clock: Callable[[], float] = time.monotonic, *, logs: bool = True
    ) -> None:
        """`logs` is False where another process of the service writes the log lines."""
        self._engine = engine
        self._logs = logs
        self._timeout_s = timeout_s
        self._clock = clock
        self._progress: tuple[int, int] | None = None  # number of prompt tokens and of answer tokens
        self._since_s = clock()
        self._is_stalled = False

    def waiting_since(self) -> tuple[StallReason | None, float]:
        """Why requests get no token, and for how many seconds that has been so; (None, 0) without requests."""
        stats = self._engine.stats
        if self._note_progress() is None or stats is None:
            return None, 0.0
        reason = StallReason.NO_TOKEN
        if not stats.num_running:
            is_full = stats.num_pages_used >= stats.num_pages_total
            reason = StallReason.NO_PAGES if is_full else StallReason.NOT_ADMITTED
        return reason, self._clock() - self._since_s

    def _note_progress(self) -> tuple[int, int] | None:
        """Tokens computed so far, None if no request wants any; notes when the number changes."""
        stats = self._engine.stats
        progress = None
        if self._engine.ready and stats is not None and stats.num_waiting + stats.num_running > 0:
            progress = (stats.num_prompt_tokens, stats.num_generated_tokens)
        if progress is None or progress != self._progress:
            self._progress, self._since_s = progress, self._clock()
        return progress

    def check(self) -> str | None:
        """None, or a description of the stall for clients. Call it often; it logs when a stall begins and ends."""
        stats, progress = self._engine.stats, self._note_progress()
        stalled_s = self._clock() - self._since_s
        if stats is None or progress is None or stalled_s < self._timeout_s:
            if self._is_stalled and self._logs:
                log.info("the engine's stall is over")
            self._is_stalled = False
            return None
        reason = (
            f"the engine stalls: {stats.num_waiting} requests wait and {stats.num_running} run, but no token was "
            f"computed for {stalled_s:.0f} s"
        )
        if not self._is_stalled and self._logs:
            log.error("%s; %d of %d KV pages are in use", reason, stats.num_pages_used, stats.num_pages_total)
        self._is_stalled = True
        return reason
