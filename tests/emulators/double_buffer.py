"""DeepEP's low-latency double buffer, and the CUDA graph captures of ranks that are threads. `deepep.py` has its rules.

The library: csrc/legacy/buffer.hpp (`low_latency_buffer_idx`) and csrc/kernels/legacy/internode_ll.cu at dd758ca.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.emulators.ranks import Rank
from tests.emulators.refusal import need

_thread = threading.local()  # `capture`: the graph that this rank captures into


class CapturedCalls:
    """A captured graph, of which only the low-latency calls matter here."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def replay(self) -> None:
        """Run the captured calls on the halves of the buffer that they were captured with."""
        for call in self.calls:
            call()


@contextmanager
def capturing() -> Iterator[CapturedCalls]:
    """Calls of this rank are captured, not run, until the end of the block."""
    _thread.capture = CapturedCalls()
    try:
        yield _thread.capture
    finally:
        _thread.capture = None


def is_capturing() -> bool:
    """What `torch.cuda.is_current_stream_capturing` would say to this rank."""
    return getattr(_thread, "capture", None) is not None


def _run_or_capture(call: Callable[[], None]) -> None:
    if is_capturing():
        _thread.capture.calls.append(call)
    else:
        call()


class DoubleBuffer:
    """Whose turn it is, which the host counts, and whether the counters of either half are zero on the device."""

    def __init__(self, group: Rank) -> None:
        self.group = group
        self.next_half = 0
        self.is_zero = [True, True]

    def soil(self) -> None:
        """Normal kernels wrote over the counters."""
        self.is_zero = [False, False]

    def clean(self) -> None:
        """Zero both halves, on all ranks together."""
        _run_or_capture(self._zero)

    def take(self) -> None:
        """Count one low-latency call on the host, and run its part on the device."""
        half, self.next_half = self.next_half, 1 - self.next_half
        _run_or_capture(lambda: self._use(half))

    def _zero(self) -> None:
        self.group.exchange("clean")  # a barrier of all ranks before and after
        self.is_zero = [True, True]

    def _use(self, half: int) -> None:
        need(self.is_zero[half], f"counters of half {half} are not zero: the kernel takes old ones or waits for ever")
        self.is_zero[half], self.is_zero[1 - half] = False, True
