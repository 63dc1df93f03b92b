"""Starts a server as a process of its own, waits until it is ready, and ends it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from evals.client import ServerError

START_TIMEOUT_S = 900.0  # a large model's weights may come from a slow disk
_END_TIMEOUT_S = 30.0
_READY = re.compile(r" ready at (http://\S+/v1) ")


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
        ServerError: the server ended, or was not ready in time; the message is the last that it said.
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
                    lines = log.read_text(encoding="utf-8").strip().splitlines()
                    raise ServerError(lines[-1] if lines else f"{command[0]} ended with status {server.returncode}")
                time.sleep(0.1)
            yield found[1]
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
