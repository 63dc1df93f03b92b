"""Entry point of the command `moe-serve`. Handles signals first, then imports the rest, which takes a while.

Process 1 of a container gets only signals that it handles, so a SIGTERM during the imports would be lost. So this file
imports none of ours at its top. Until the HTTP server takes over, a signal ends the process at once, even inside an
import: nothing can catch it, as an `except ImportError` would an exception. The engine's process, if there is one, ends
when its standard input closes.
"""

import faulthandler
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def main() -> int:
    """Run the command and return its exit status, 1 if its result cannot be written."""
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else `nohup` asked to outlive the terminal
        signal.signal(signal.SIGHUP, _end)
    from server import open_files, streams

    streams.open_missing()
    open_files.raise_limit()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the service adds its state, and its other processes
    from server import cli

    try:
        status = cli.main()
    except streams.OutputError as error:
        streams.write(sys.stderr, f"{cli.PROGRAM}: {error}\n")
        status = 1
    for stream in (sys.stdout, sys.stderr):  # log lines may still be in their buffers
        streams.write(stream, "")
    return status


def _end(sig: int, _frame: FrameType | None) -> None:
    """Nothing is served yet, so SIGTERM and SIGHUP exit with status 0, as after draining."""
    os._exit(INTERRUPTED if sig == signal.SIGINT else 0)
