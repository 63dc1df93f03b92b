"""`Progress`: a bar on standard error in a terminal, one log line per 5 % elsewhere. Its caller counts."""

import logging
import sys
import time
from types import TracebackType
from typing import Self, TextIO

_log = logging.getLogger(__name__)
_LOG_STEP_PERCENT = 5


class Progress:
    """Shows how much of `total` is done; use as a context manager and call `advance`."""

    def __init__(self, title: str, total: int, *, stream: TextIO | None = None) -> None:
        """`stream` (default: standard error) gets a bar if it is a terminal."""
        self._title, self._total, self._done = title, max(total, 1), 0
        self._logged_percent = 0
        self._start_s = time.monotonic()
        self._stream = stream or sys.stderr
        self._bar: _Bar | None = None

    def __enter__(self) -> Self:
        if self._stream.isatty():
            self._bar = _Bar(self._title, self._total, self._stream)
        return self

    def advance(self, amount: int = 1) -> None:
        """Count `amount` more as done."""
        self._done += amount
        if self._bar is not None:
            self._bar.show(self._done)
            return
        percent = 100 * self._done // self._total // _LOG_STEP_PERCENT * _LOG_STEP_PERCENT
        if percent > self._logged_percent:
            self._logged_percent = percent
            _log.info("%s: %d %% (%.1f s)", self._title, percent, time.monotonic() - self._start_s)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


class _Bar:
    """The terminal's bar; rich is imported here because servers without a terminal never need it."""

    def __init__(self, title: str, total: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn(title), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
        self._rich = RichProgress(*columns, console=Console(file=stream))
        self._task = self._rich.add_task(title, total=total)
        self._rich.start()

    def show(self, done: int) -> None:
        self._rich.update(self._task, completed=done)

    def close(self) -> None:
        self._rich.stop()
