"""Starts a server as a process of its own, waits until it is ready, and ends it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from evals.client import ServerError

START_TIMEOUT_S = 900.0  # a large model's weights may come from a slow disk
_END_TIMEOUT_S = 30.0
_READY = re.compile(r" ready at (http://\S+/v1) ")
_REFUSED = 2  # exit status of a server that cannot start as it is set


class StartRefused(ServerError):
    """The server's settings or its model are wrong, so that it would refuse another start too."""


@contextmanager
def serving(
    command: Sequence[str],
    log: Path,
    variables: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[str]:
    """Base URL of the server that `command` starts; it ends with the block. Its output goes to `log`.

    `variables` are added to the environment. The command runs in `folder`, by default in the current one.

    Raises:
        StartRefused: the server ended with status 2; the message is the last that it said.
        ServerError: it ended otherwise, or was not ready in time; the message names its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    with (
        open(log, "w", encoding="utf-8") as out,
        subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **(variables or {})}, cwd=folder
        ) as server,
    ):
        try:
            while not (found := _READY.search(log.read_text(encoding="utf-8"))):
                if server.poll() is not None or time.monotonic() - start_s > start_timeout_s:
                    raise _start_error(server.returncode, log, start_timeout_s)
                time.sleep(0.1)
            yield found[1]
        finally:
            try:
                server.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    server.wait(_END_TIMEOUT_S)
            finally:  # also if a signal has ended the wait
                server.kill()


def _start_error(status: int | None, log: Path, start_timeout_s: float) -> ServerError:
    """Why there is no server: it ended with `status`, or still runs if that is None."""
    lines = log.read_text(encoding="utf-8").strip().splitlines() or ["it said nothing"]
    if status == _REFUSED:
        return StartRefused(lines[-1])
    how = f"was not ready after {start_timeout_s:g} s" if status is None else f"ended with status {status}"
    return ServerError(f"the server {how}: {lines[-1]}; its log is {log}")
