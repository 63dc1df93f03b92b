"""Ranks that are forks of this process, for programs that run in Triton's interpreter with shared memory."""

import os
import signal
from collections.abc import Callable

_TIMEOUT_S = 100


def sum_over_ranks(num_ranks: int, count: Callable[[int], int], most: int) -> int:
    """The sum of `count(rank)`, each at most `most` and below 256; a rank that fails or does not end counts `most`."""
    pids = []
    for rank in range(num_ranks):
        pids.append(os.fork())
        if pids[-1] == 0:
            signal.alarm(_TIMEOUT_S)
            found = most
            try:
                found = count(rank)
            finally:
                os._exit(found)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return sum(most if status < 0 else status for status in statuses)
