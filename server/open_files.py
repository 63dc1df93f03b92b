"""Open files: the limit of this process, raised at start, and a warning while no more can be opened.

Each connection takes one. Without any left, the event loop closes new connections and says nothing.
"""

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

MORE_FILES = "ulimit -n 65536, LimitNOFILE= in systemd, or docker run --ulimit nofile=65536"
"""What to do about a limit that is too low."""

_MOST = 1 << 20  # some programs that we start go through all numbers below the limit
_WARN_EVERY_S = 10.0


def raise_limit() -> None:
    """Let this process and those that it starts open as many files as the system allows."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # the kernel's own limit is lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class FullWarning:
    """Warns while no file can be opened, at most every 10 s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = clock()

    def check(self) -> None:
        """Try to open a file, which takes microseconds. Call it often."""
        try:
            os.close(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if error.errno == errno.EMFILE:
                self.give()

    def give(self) -> None:
        """Warn now, unless that was done a moment ago."""
        if self._clock() < self._next_s:
            return
        self._next_s = self._clock() + _WARN_EVERY_S
        import resource  # not on Windows

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        log.warning(
            "this process has opened all %d files that it may, and each connection takes one; let it open more: %s",
            limit,
            MORE_FILES,
        )
