"""`ExpertReader`: reads the experts of the layers in order, one layer ahead where that hides the reading.

On a GPU the canonical weights of a layer leave host memory before they are processed, so a thread may read the next
layer meanwhile: host memory never holds more than one. On a CPU they are processed where they are, and generated
(dummy) weights are made on the device, so both are read when they are asked for.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from loaders.phases import Phase, StartPhases
from moe.formats import ExpertWeights


class ExpertReader:
    """Use as a context manager: `take` gives the experts of the next of `layers`, on the device."""

    def __init__(
        self,
        read: Callable[[int], ExpertWeights],
        layers: Sequence[int],
        device: torch.device,
        phases: StartPhases,
        *,
        is_ahead: bool,
    ) -> None:
        """`read` gives the canonical experts of a layer, where the source keeps them. It runs in a thread if
        `is_ahead`, never twice at the same time.
        """
        self._read, self._device, self._phases = read, device, phases
        self._next_of = dict(itertools.pairwise(layers))
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="read-ahead") if is_ahead else None
        self._ahead: tuple[int, Future[tuple[ExpertWeights, float]]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def take(self, layer: int) -> ExpertWeights:
        """The experts of a layer. Errors of `read` are raised here, whichever thread it ran in."""
        start_s = time.monotonic()
        if self._ahead is not None and self._ahead[0] == layer:
            experts, read_s = self._ahead[1].result()
            self._ahead = None
            waited_s = time.monotonic() - start_s
            self._phases.advance(Phase.WEIGHTS, 0, hidden_s=max(0.0, read_s - waited_s))
        else:
            experts, _ = self._timed(layer)
        experts = _to_device(experts, self._device)  # from here on the copy in host memory is free
        following = self._next_of.get(layer)
        if self._threads is not None and following is not None:
            self._ahead = following, self._threads.submit(self._timed, following)
        return experts

    def _timed(self, layer: int) -> tuple[ExpertWeights, float]:
        start_s = time.monotonic()
        return self._read(layer), time.monotonic() - start_s


def _to_device(experts: ExpertWeights, device: torch.device) -> ExpertWeights:
    return dataclasses.replace(
        experts,
        w13=experts.w13.to(device),
        w2=experts.w2.to(device),
        b13=None if experts.b13 is None else experts.b13.to(device),
        b2=None if experts.b2 is None else experts.b2.to(device),
    )
