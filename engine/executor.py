"""`StepExecutor`: launches, samples and collects steps, and runs requests one at a time when a step fails.

`core` applies the results to the requests. At most one step is between `launch` and `sample`, and at most one more
between `sample` and `collect`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch

from engine.batching import make_step
from engine.expert_rounds import ExpertRounds
from engine.logs import FIELDS
from engine.runner import ModelRunner, Pending, RowResult
from engine.sequence import Chunk

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(slots=True)
class LaunchedStep:
    """A step in flight, or the error of its launch.

    `max_rank_tokens`: of the rank that has most, where ranks run the step together and some rank has a prompt; else 0.
    """

    chunks: list[Chunk]
    start_s: float
    pending: Pending | Exception
    max_rank_tokens: int = 0

    @property
    def num_decodes(self) -> int:
        """Requests of this rank that go on by one token."""
        return sum([chunk.num_tokens == 1 for chunk in self.chunks])

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of prompts, of the rank that has most: the others wait for it."""
        num_tokens = sum([chunk.num_tokens for chunk in self.chunks])
        return max(num_tokens, self.max_rank_tokens) - self.num_decodes


class ChunkResult(msgspec.Struct, frozen=True, eq=False):
    """The result of a step for one chunk; None if the request cannot be served, and the log says why."""

    chunk: Chunk
    row: RowResult | None


class StepExecutor:
    """Runs steps on one runner. Raises errors of the device, after which this process cannot continue."""

    can_retry = True  # a failed step may be run again, in parts

    def __init__(
        self, runner: ModelRunner, *, overlaps: bool, clock: Callable[[], float], rounds: ExpertRounds
    ) -> None:
        self.runner = runner
        self.rounds = rounds
        self.overlaps = overlaps
        self._clock = clock

    @property
    def others_may_have_work(self) -> bool:
        """True if other ranks wait for this one to take part in a step, even without work of its own."""
        return False

    def launch(self, chunks: list[Chunk]) -> LaunchedStep | None:
        """Start the forward pass of these chunks. An error that may be one request's fault is kept for `sample`.

        None if nothing of this rank's was launched.
        """
        self.rounds.before_step()
        start_s = self._clock()
        step = make_step(chunks, self.runner.page_size)
        return LaunchedStep(chunks, start_s, _attempt(lambda: self.runner.launch(step)))

    def rest(self) -> None:
        """Nobody has work, and no other rank waits for this one."""
        self.rounds.rest()

    def sample(self, launched: LaunchedStep, is_wanted: Callable[[Chunk], bool]) -> Exception | None:
        """Launch the choice of tokens, for the requests that still want one. Returns why the step failed, or None.

        Call when every earlier step is collected and applied.
        """
        pending = launched.pending
        if isinstance(pending, Exception):
            return pending
        seqs = [chunk.seq if is_wanted(chunk) else None for chunk in launched.chunks]
        return _attempt(lambda: pending.sample(seqs))

    def collect(self, launched: LaunchedStep) -> list[ChunkResult] | Exception:
        """Wait for a sampled step and return the result of each chunk, or the step's error."""
        pending = launched.pending
        rows = pending if isinstance(pending, Exception) else _attempt(pending.collect)
        if isinstance(rows, Exception):
            return rows
        return [ChunkResult(chunk, row) for chunk, row in zip(launched.chunks, rows, strict=True)]

    def run(self, chunks: list[Chunk]) -> list[ChunkResult] | Exception:
        """Launch, sample and collect a step, with nothing else in flight."""
        launched = self.launch(chunks)
        if launched is None:
            return []
        error = self.sample(launched, lambda chunk: True)
        return self.collect(launched) if error is None else error

    def run_singly(self, chunks: list[Chunk], error: Exception) -> list[ChunkResult]:
        """Run the requests of a failed step one at a time, to find those that cause the error."""
        if len(chunks) > 1:
            logger.warning("a step of %d requests failed (%s); running them one at a time", len(chunks), error)
        results = []
        for chunk in chunks:
            outcome = self.run([chunk]) if len(chunks) > 1 else error
            if isinstance(outcome, Exception):
                _log_failure(chunk, outcome)
                results.append(ChunkResult(chunk, None))
            else:
                results += outcome
        return results

    def give_up(self, chunks: list[Chunk], error: Exception) -> list[ChunkResult]:
        """End all requests of a failed step."""
        for chunk in chunks:
            _log_failure(chunk, error)
        return [ChunkResult(chunk, None) for chunk in chunks]


def _log_failure(chunk: Chunk, error: Exception) -> None:
    request_id = chunk.seq.request_id
    logger.error("request %s failed", request_id, exc_info=error, extra={FIELDS: {"engine_id": request_id}})


def _attempt(action: Callable[[], _T]) -> _T | Exception:
    """The action's result, or the exception that it raises, so that other requests can go on."""
    try:
        return action()
    except torch.AcceleratorError:
        raise
    except Exception as error:
        return error
