"""Times a contender in CUDA graphs: other weights and another id set on every call, nothing left in the L2.

A graph holds several calls, each on a copy of its own. Before a set is timed its routing is copied into the graph's
tensors; a replay that is not timed keeps the card busy while the timed ones are queued.
"""

import math
import statistics
from typing import Any

import torch

from benchmarks.copies import clone, copy_into
from benchmarks.moe_contenders import Contender

ROTATION_BYTES = 400e6  # active bytes of all copies together: eight times the L2 of an H100
MANY_TOKENS = 1024  # from here on a call is long, and fewer of them suffice


def copies_needed(active_bytes: float, most: int = 8) -> int:
    """How many copies of a layer a rotation needs so that a call finds nothing of its weights in the L2."""
    return max(2, min(most, math.ceil(ROTATION_BYTES / active_bytes)))


class Timer:
    """One captured graph of a contender for one number of tokens."""

    def __init__(self, contender: Contender, x_TH: torch.Tensor, staged: list[Any], num_copies: int) -> None:
        is_long = x_TH.shape[0] >= MANY_TOKENS
        self._num_replays = 3 if is_long else 5
        self._slots = [clone(staged[index % len(staged)]) for index in range(max(num_copies, 2 if is_long else 8))]
        x_TH = contender.tokens(x_TH)

        def calls() -> None:
            for index, routing in enumerate(self._slots):
                contender.run(index % num_copies, x_TH, routing)

        contender.run(0, x_TH, self._slots[0])  # compiles and allocates what a capture must not
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            calls()

    def us(self, staged: list[Any]) -> float:
        """Median over the id sets of the time of a call, in microseconds; every graph starts with another set."""
        times = []
        for first in range(len(staged)):
            for index, slot in enumerate(self._slots):
                copy_into(slot, staged[(first + index) % len(staged)])
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._graph.replay()
            begin.record()
            for _ in range(self._num_replays):
                self._graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / (self._num_replays * len(self._slots)))
        return statistics.median(times)
