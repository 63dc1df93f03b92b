"""`QueueSpeed`: estimates when the next place comes free from how fast places came free lately. Reads no clock."""

import math
from collections import deque

MAX_RETRY_AFTER_S = 60
_NUM_REMEMBERED = 32
_WINDOW_S = 120.0  # older entries say nothing about now


class QueueSpeed:
    """Tell it of every place that comes free. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._freed_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)

    def on_free(self, num_places: int, now_s: float) -> None:
        """Record that `num_places` requests have ended, in whatever way."""
        self._freed_s.extend([now_s] * num_places)

    def retry_after_s(self, now_s: float) -> int:
        """Whole seconds until the next place may come free: between 1 and `MAX_RETRY_AFTER_S`."""
        while self._freed_s and self._freed_s[0] < now_s - _WINDOW_S:
            self._freed_s.popleft()
        if not self._freed_s:
            return 1  # nothing is known yet
        mean_gap_s = (now_s - self._freed_s[0]) / len(self._freed_s)
        return min(max(1, math.ceil(mean_gap_s)), MAX_RETRY_AFTER_S)
