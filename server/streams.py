"""Writes to standard output and error, which may be closed, full, or a pipe without a reader."""

import os
import sys
from typing import TextIO


class OutputError(Exception):
    """The result of a command cannot be written."""


def open_missing() -> None:
    """Open the null device for descriptors 0 to 2 that are closed, so that no socket gets their numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, so this descriptor
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def write(stream: TextIO, text: str) -> OSError | None:
    """Write and flush; returns what went wrong. After an error the stream goes to the null device.

    Otherwise Python would write the rest again at exit, fail, and turn the exit status into 120.
    """
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        return error
    return None


def say(text: str) -> None:
    """Write the result of a command to standard output. Raises OutputError."""
    error = write(sys.stdout, text)
    if error is not None:
        raise OutputError(f"cannot write to standard output: {error.strerror}")
