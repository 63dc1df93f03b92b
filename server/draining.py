"""How the service drains: which signals ask for it, and why it stops waiting for running requests."""

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from server.config import ServerConfig
from server.request_group import Engine

LAST_CALL_S = 2  # what connections get to close once the drain timeout has cut their requests
SECOND_SIGNAL = 2
_HANGS_AFTER_S = 5.0  # while draining; a healthy engine sends its statistics more often
_POLL_S = 0.05


@contextmanager
def sighup_handled_by(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGHUP like other signals, unless `nohup` had the process ignore it; it stays ignored then."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    if is_ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextmanager
def signals_handled_by(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGTERM, SIGINT and SIGHUP, the latter as `sighup_handled_by` does."""
    before = {sig: signal.signal(sig, handle) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        with sighup_handled_by(handle):
            yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Why running requests are ended before they are finished."""

    reason: str
    engine_hangs: bool = False


async def wait_until_drained(
    engine: Engine,
    config: ServerConfig,
    *,
    is_idle: Callable[[], bool],
    wait_idle: Callable[[], Awaitable[object]],
    num_signals: Callable[[], int],
) -> Cut | None:
    """Wait for running requests. Returns None once all have ended, else why we no longer wait."""
    until_s = time.monotonic() + config.drain_timeout
    while not is_idle():
        if engine.failure is not None:
            return Cut(reason="the engine has died")
        if engine.heartbeat_age_s > min(_HANGS_AFTER_S, config.heartbeat_timeout):
            return Cut(reason=f"the engine hangs: no heartbeat for {engine.heartbeat_age_s:.1f} s", engine_hangs=True)
        if num_signals() >= SECOND_SIGNAL:
            return Cut(reason="a second signal")
        if time.monotonic() >= until_s:
            return Cut(reason="the drain timeout is over")
        with suppress(TimeoutError):
            await asyncio.wait_for(wait_idle(), _POLL_S)
    return None
