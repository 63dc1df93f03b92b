"""SIGUSR1: a process writes the stacks of its threads, and a description of its state, to standard error and goes on.

The stacks are written by the signal handler itself, in C, so a thread that hangs with Python's lock hides nothing. The
state comes from a thread of its own, which only needs that lock.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

SIGNAL = signal.SIGUSR1


def dump_on_signal(describe: Callable[[], str]) -> None:
    """From now on, SIGUSR1 makes this process write its stacks and what `describe` returns. Call in the main thread.

    For processes without an event loop: the signal wakes the thread through `signal.set_wakeup_fd`, which loops use.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    faulthandler.unregister(SIGNAL)  # else `register` would not notice the new handler behind it
    signal.signal(SIGNAL, lambda _sig, _frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    faulthandler.register(SIGNAL, all_threads=True, chain=True)
    threading.Thread(target=_describe_at_signals, args=(reader, describe), name="stack-dump", daemon=True).start()


def _describe_at_signals(reader: int, describe: Callable[[], str]) -> None:
    while received := os.read(reader, 1):
        if received[0] == SIGNAL:
            try:
                text = describe()
            except Exception as error:  # the state is read while another thread changes it
                text = f"the state cannot be described now: {error!r}"
            write_state(text)


def write_state(text: str) -> None:
    """Write the state of this process below its stacks."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"process {os.getpid()}: {text}\n".encode())


def forward_on_signal(describe: Callable[[], str], children: Callable[[], Iterable[int]]) -> None:
    """The same for a process with an event loop, which also sends the signal on to its children, given by their ids."""

    def on_signal(_sig: int, _frame: object) -> None:
        write_state(describe())
        for pid in children():
            if handles_signal(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, SIGNAL)

    faulthandler.unregister(SIGNAL)
    signal.signal(SIGNAL, on_signal)
    faulthandler.register(SIGNAL, all_threads=True, chain=True)


def handles_signal(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process has a handler for SIGUSR1; one that starts has none yet, and would die of the signal."""
    try:
        status = (proc / str(pid) / "status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)
