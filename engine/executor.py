"""`StepExecutor`: launches, samples and collects steps, and runs requests one at a time when a step fails.

It applies nothing to a request: `core` does. One step at a time is between `launch` and `sample`; one more may be
sampled and not yet collected.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch

from engine.batching import make_step
from engine.runner import ModelRunner, Pending, RowResult
from engine.sequence import Chunk

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(slots=True)
class LaunchedStep:
    """A step on its way, or why its launch failed."""

    chunks: list[Chunk]
    start_s: float
    pending: Pending | Exception


class ChunkResult(msgspec.Struct, frozen=True, eq=False):
    """What a step gave for one chunk; None: the request cannot be served, and the log says why."""

    chunk: Chunk
    row: RowResult | None


class StepExecutor:
    """Runs steps on one runner. Errors of the device itself are raised: nothing can go on in this process."""

    def __init__(self, runner: ModelRunner, *, overlaps: bool, clock: Callable[[], float]) -> None:
        self.runner = runner
        self.overlaps = overlaps
        self._clock = clock

    def launch(self, chunks: list[Chunk]) -> LaunchedStep:
        """Start the forward pass of these chunks. An error that may be one request's fault is kept for `sample`."""
        start_s = self._clock()
        step = make_step(chunks, self.runner.page_size)
        return LaunchedStep(chunks, start_s, _attempt(lambda: self.runner.launch(step)))

    def sample(self, launched: LaunchedStep, is_wanted: Callable[[Chunk], bool]) -> Exception | None:
        """Launch the choice of tokens, for the requests that still want one. Returns why the step failed, or None.

        Call when every earlier step is collected and applied.
        """
        pending = launched.pending
        if isinstance(pending, Exception):
            return pending
        seqs = [chunk.seq if is_wanted(chunk) else None for chunk in launched.chunks]
        return _attempt(lambda: pending.sample(seqs, keeps_tokens=self.overlaps))

    def collect(self, launched: LaunchedStep) -> list[ChunkResult] | Exception:
        """Wait for a sampled step; what it gave for each chunk, or why it failed."""
        pending = launched.pending
        rows = pending if isinstance(pending, Exception) else _attempt(pending.collect)
        if isinstance(rows, Exception):
            return rows
        return [ChunkResult(chunk, row) for chunk, row in zip(launched.chunks, rows, strict=True)]

    def run(self, chunks: list[Chunk]) -> list[ChunkResult] | Exception:
        """Launch, sample and collect a step, with nothing else on its way."""
        launched = self.launch(chunks)
        error = self.sample(launched, lambda chunk: True)
        return self.collect(launched) if error is None else error

    def run_singly(self, chunks: list[Chunk], error: Exception) -> list[ChunkResult]:
        """Pin the error of a step on the requests it belongs to: run them one at a time."""
        if len(chunks) > 1:
            logger.warning("a step of %d requests failed (%s); running them one at a time", len(chunks), error)
        results = []
        for chunk in chunks:
            outcome = self.run([chunk]) if len(chunks) > 1 else error
            if isinstance(outcome, Exception):
                logger.error("request %s failed", chunk.seq.request_id, exc_info=outcome)
                results.append(ChunkResult(chunk, None))
            else:
                results += outcome
        return results


def _attempt(action: Callable[[], _T]) -> _T | Exception:
    """What the action returns, or the exception that it raises: it must not take the other requests along."""
    try:
        return action()
    except torch.AcceleratorError:
        raise
    except Exception as error:
        return error
