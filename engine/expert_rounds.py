"""`ExpertRounds`: what ranks do between steps for their experts: add up counters, and move experts one layer a step.

Every rank of the engine makes the same calls in the same order, since they meet in collectives.
"""

from dataclasses import dataclass

import torch

from engine.transfer import Mark, to_host
from engine.types import ExpertLoad
from model.balance import ExpertBalance
from moe.group import SINGLE_RANK, Group

REPORT_STEPS = 256  # between two reports, unless nobody has work


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """Counters of all ranks on their way to the host, which they have reached when the mark is passed."""

    counts_LE: torch.Tensor
    mark: Mark


class ExpertRounds:
    """Calls of one rank; without counters (`balance` is None) they do nothing."""

    def __init__(self, balance: ExpertBalance | None, *, world: Group = SINGLE_RANK, interval: int = 0) -> None:
        """`world`: all ranks. `interval`: steps from one placement of the experts to the next; 0 for never.

        What was counted so far, while the model warmed up, is forgotten.
        """
        self._balance, self._world, self._interval = balance, world, interval
        self._num_steps = 0
        self._num_unreported = 0
        self._moving: list[int] = []  # layers still to be placed, by index
        self._window: list[list[int]] = []  # tokens by expert, from which they are placed
        self._counted_before: torch.Tensor | None = None  # where the window began
        self._num_moves = 0
        self._copy: _Copy | None = None  # the last one; the step loop alone sets it
        self._report: tuple[_Copy | None, ExpertLoad | None] = None, None  # the copy that was described last, and how
        if balance is not None:
            balance.counts_LE.zero_()  # reported until the first copy, so that nobody takes it for no counting
            self._report = None, self._describe(balance, balance.counts_LE.cpu())

    @property
    def has_news(self) -> bool:
        """Whether `rest` would report. The same on every rank."""
        return self._num_unreported > 0

    def before_step(self) -> None:
        """Call before every step, also before one in which this rank has no tokens."""
        if self._balance is None:
            return
        if self._moving:
            index = self._moving.pop(0)
            self._num_moves += self._balance.rebalance(index, self._window[index], self._world)
        if self._num_unreported >= REPORT_STEPS:
            self._share(self._balance)
        self._num_steps += 1
        self._num_unreported += 1
        if self._interval and self._num_steps % self._interval == 0:
            self._begin_moves(self._balance)

    def rest(self) -> None:
        """Call when nobody has work."""
        if self._balance is not None and self._num_unreported:
            self._share(self._balance)

    def report(self) -> ExpertLoad | None:
        """Tokens by expert on all ranks, some steps old; None if nobody counts. Other threads may call it."""
        copy, balance = self._copy, self._balance
        described, report = self._report
        if copy is not None and balance is not None and copy is not described and copy.mark.is_passed:
            report = self._describe(balance, copy.counts_LE)
            self._report = copy, report
        return report

    def _begin_moves(self, balance: ExpertBalance) -> None:
        """Take the tokens since the last time; the layers follow one by one, lest a step wait for all of them."""
        counts_LE = balance.total(self._world)
        before = torch.zeros_like(counts_LE) if self._counted_before is None else self._counted_before
        self._window = (counts_LE - before).tolist()
        self._counted_before = counts_LE
        self._moving = [index for index, load_E in enumerate(self._window) if any(load_E)]

    def _share(self, balance: ExpertBalance) -> None:
        self._copy = _Copy(to_host(balance.total(self._world)), Mark(balance.counts_LE.device))
        self._num_unreported = 0

    def _describe(self, balance: ExpertBalance, counts_LE: torch.Tensor) -> ExpertLoad:
        rows = counts_LE.tolist()
        ratios = []
        for index, load_E in enumerate(rows):
            loads = balance.rank_loads(index, load_E)
            ratios.append(max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0)
        return ExpertLoad(
            layers=[experts.layer for experts in balance.layers],
            num_experts=balance.num_experts,
            counts=counts_LE.numpy().astype("<i8").tobytes(),
            rank_ratios=ratios,
            num_moves=self._num_moves,
        )
