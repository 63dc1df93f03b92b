"""Entry of the command `moe-serve`. Makes the process stoppable, then imports the rest, which takes a while.

As process 1 of a container a process gets no signal that it does not handle: a SIGTERM that came during the imports was
lost. Until the HTTP server takes the signals over, they end the process at once. The engine's process, should it run
already, ends when its standard input closes.
"""

import os
import signal
import sys
from types import FrameType

from server import streams

INTERRUPTED = 130


def main() -> int:
    """Run the command; its exit status, or 1 if its result cannot be written."""
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    streams.open_missing()
    from server import cli

    try:
        status = cli.main()
    except streams.OutputError as error:
        streams.write(sys.stderr, f"{cli.PROGRAM}: {error}\n")
        status = 1
    for stream in (sys.stdout, sys.stderr):  # what log lines, say, have left in it
        streams.write(stream, "")
    return status


def _end(sig: int, _frame: FrameType | None) -> None:
    """Nothing is served yet, so a SIGTERM is obeyed with status 0, as after draining."""
    os._exit(0 if sig == signal.SIGTERM else INTERRUPTED)
