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
_UNWRITTEN = 1


def main() -> int:
    """Run the command; its exit status, or 1 if its output could not be written."""
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    streams.open_missing()
    from server import cli

    try:
        status = cli.main()
    except SystemExit as end:  # --help
        status = int(end.code or 0)
    error = streams.write(sys.stdout, "")
    if error is not None:
        streams.write(sys.stderr, f"{cli.PROGRAM}: cannot write to standard output: {error.strerror}\n")
    streams.write(sys.stderr, "")
    return _UNWRITTEN if error is not None and status == 0 else status


def _end(sig: int, _frame: FrameType | None) -> None:
    """Nothing is served yet, so a SIGTERM is obeyed with status 0, as after draining."""
    os._exit(0 if sig == signal.SIGTERM else INTERRUPTED)
