"""`RankedExecutor`: steps that several ranks run together. `Follower`: a rank that runs what another one schedules.

A failed launch ends the engine: other ranks may be inside a collective already, so nothing can be run again by one
rank alone. That holds for a step that runs out of memory, too. An error of the sampler, which is this rank's own,
ends the requests of the step.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.agreement import Word
from engine.batching import make_step
from engine.config import EngineConfig
from engine.errors import EngineConfigError
from engine.executor import LaunchedStep, StepExecutor
from engine.expert_rounds import ExpertRounds
from engine.load import LoadedEngine, load_engine
from engine.runner import Model, ModelRunner, Pending
from engine.sequence import Chunk
from engine.step import StepBatch
from engine.step_link import Idle, Obey, Rest, Stop
from engine.types import EngineInfo, EngineStats, ExpertLoad, OrderKind
from loaders.phases import StartPhases
from moe.group import TorchGroup

if TYPE_CHECKING:
    from engine.rank_links import RankLinks

_POLL_MS = 250

logger = logging.getLogger(__name__)


def make_executor(
    config: EngineConfig, loaded: LoadedEngine, *, clock: Callable[[], float], ranks: "RankLinks | None"
) -> StepExecutor:
    """The executor of a rank that schedules: alone, or for and with others."""
    rounds = make_rounds(config, loaded.runner, ranks)
    if ranks is None:
        return StepExecutor(loaded.runner, overlaps=loaded.overlaps, clock=clock, rounds=rounds)
    return RankedExecutor(loaded.runner, overlaps=loaded.overlaps, clock=clock, rounds=rounds, ranks=ranks)


def make_rounds(config: EngineConfig, runner: ModelRunner, ranks: "RankLinks | None") -> ExpertRounds:
    """What this rank and the others do for their experts between steps."""
    balance = runner.model.balance
    if balance is None or ranks is None:
        return ExpertRounds(balance)
    interval = config.eplb_interval if config.enable_eplb else 0
    return ExpertRounds(balance, world=TorchGroup(ranks.world), interval=interval)


class RankedExecutor(StepExecutor):
    """Agrees on every step with the other scheduling ranks, sends it to the ranks that follow, then runs it."""

    can_retry = False

    def __init__(
        self,
        runner: ModelRunner,
        *,
        overlaps: bool,
        clock: Callable[[], float],
        rounds: ExpertRounds,
        ranks: "RankLinks",
    ) -> None:
        super().__init__(runner, overlaps=overlaps, clock=clock, rounds=rounds)
        self._ranks = ranks

    @property
    def others_may_have_work(self) -> bool:
        """True until all ranks have agreed that there is nothing to do, and while one wants to stop."""
        return not self._ranks.agreement.is_waiting or self._ranks.wants_stop

    def launch(self, chunks: list[Chunk]) -> LaunchedStep | None:
        """Take part in the next step of all ranks. An error ends the engine."""
        ranks = self._ranks
        step = make_step(chunks, self.runner.page_size) if chunks else None
        agreed = ranks.agreement.agree(_word_of(step, ranks))
        if agreed.stops:
            ranks.steps.send(Stop())
            ranks.is_stopped = True
            return None
        if not agreed.max_rank_tokens:
            if self.rounds.has_news:
                ranks.steps.send(Rest())
                self.rounds.rest()
            return None
        start_s = self._clock()
        if step is None:
            ranks.steps.send(Idle(agreed.max_rank_tokens, agreed.all_ranks_decode))
            self.rounds.before_step()
            self.runner.run_idle(agreed.max_rank_tokens, agreed.all_ranks_decode)
            return None
        step = replace(
            step,
            all_ranks_decode=agreed.all_ranks_decode,
            max_rank_tokens=agreed.max_rank_tokens if ranks.dp_size > 1 else None,
        )
        ranks.steps.send(step)  # first, since those who follow take part in what comes before the step, too
        self.rounds.before_step()
        prompt_tokens = 0 if agreed.all_ranks_decode or ranks.dp_size == 1 else agreed.max_rank_tokens
        return LaunchedStep(chunks, start_s, launch(self.runner, step), max_rank_tokens=prompt_tokens)

    def rest(self) -> None:
        """Nothing: the ranks have rested together when they agreed that nobody has work."""


def _word_of(step: StepBatch | None, ranks: "RankLinks") -> Word:
    if step is None:
        return Word(stops=ranks.wants_stop)
    num_tokens = len(step.input_ids)
    decodes = step.is_decode and all(row.samples for row in step.rows)
    fits = ranks.low_latency_limit is None or num_tokens <= ranks.low_latency_limit
    return Word(num_tokens=num_tokens, decodes=decodes and fits, stops=ranks.wants_stop)


def launch(runner: ModelRunner, step: StepBatch) -> Pending:
    """Launch a step that other ranks run too. Raises EngineConfigError where it does not fit in memory."""
    try:
        return runner.launch(step)
    except torch.OutOfMemoryError as error:
        raise EngineConfigError(
            f"a step of {len(step.input_ids)} tokens ran out of memory, and several ranks cannot try it again in "
            "parts: lower max_num_batched_tokens, max_num_seqs or gpu_memory_utilization"
        ) from error


class Follower:
    """A rank that schedules nothing: it loads the model and runs the steps of its group's first rank."""

    def __init__(
        self, config: EngineConfig, ranks: "RankLinks", model: Model | None = None, phases: StartPhases | None = None
    ) -> None:
        """Arguments and errors as `EngineCore`."""
        loaded: LoadedEngine = load_engine(config, model, ranks, phases)
        self._runner = loaded.runner
        self._rounds = make_rounds(config, loaded.runner, ranks)
        self._ranks = ranks
        self.info: EngineInfo = loaded.make_info(config, load_seconds=0.0)

    def stats(self) -> EngineStats | None:
        """None: the first rank of the group counts."""
        return None

    def describe(self) -> str:
        """What it does, in words."""
        return "takes the steps of the first rank of its group"

    def expert_load(self) -> ExpertLoad | None:
        """None: the first rank of the group reports."""
        return None

    def follow(self, turn: Callable[[], None], obey: Callable[[OrderKind], None]) -> None:
        """Run steps until told to stop; calls `turn` with each, and a few times a second while there is none.

        `obey` carries out an order that the first rank has carried out.
        """
        while True:
            message = self._ranks.received_steps.receive(_POLL_MS, turn)
            if isinstance(message, StepBatch):
                self._rounds.before_step()
                launch(self._runner, message)
            elif isinstance(message, Rest):
                self._rounds.rest()
            elif isinstance(message, Obey):
                obey(message.kind)
            elif isinstance(message, Idle):
                self._rounds.before_step()
                self._runner.run_idle(message.max_rank_tokens, message.all_ranks_decode)
            else:
                return
