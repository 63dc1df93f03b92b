"""`Agreement`: what scheduling ranks tell each other before every step, and how they wait when nobody has work.

Each data-parallel group schedules for itself, but a step happens on all ranks or on none, because they share experts.
So in every turn each scheduling rank first says what it has and hears the others (`engine.word_link`):

    rank 0   work, 17 tokens, decodes    -> step     step     nothing: wait ......... request -> wake rank 1, step
    rank 1   nothing                     -> idle     idle     nothing: wait ..... woken by rank 0 -> idle step

Waiting costs nothing: a rank blocks on its requests. The rank that gets one wakes the others first. All of them have
waited equally often, so a wake-up call that arrives late, for a wait that is over, is told by its number.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """What one rank says. `decodes`: its step may run in the transport's low-latency mode, and in a CUDA graph."""

    num_tokens: int = 0
    decodes: bool = True
    stops: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """What all said: a step happens if `max_rank_tokens` is above 0, in low latency if `all_ranks_decode`."""

    max_rank_tokens: int
    all_ranks_decode: bool
    stops: bool


class Agreement:
    """The words of all scheduling ranks, turn by turn.

    `max_over_ranks` returns the element-wise maximum over the ranks and blocks until all have called it; None for a
    single scheduling rank. `wake_others` sends them the number of waits.
    """

    def __init__(
        self, max_over_ranks: Callable[[list[int]], list[int]] | None, wake_others: Callable[[int], None]
    ) -> None:
        self._max_over_ranks = max_over_ranks
        self._wake_others = wake_others
        self._num_waits = 0
        self.is_waiting = True  # nobody had work when the ranks last spoke

    def wake(self, num_waits: int) -> None:
        """Another rank says that it has got work."""
        if num_waits == self._num_waits:
            self.is_waiting = False

    def agree(self, word: Word) -> Agreed:
        """Say this rank's word and hear all of them."""
        if self.is_waiting:
            self._wake_others(self._num_waits)
        numbers = [word.num_tokens, int(not word.decodes), int(word.stops)]
        if self._max_over_ranks is not None:
            numbers = self._max_over_ranks(numbers)
        num_tokens, is_mixed, stops = numbers
        self.is_waiting = num_tokens == 0
        self._num_waits += self.is_waiting
        return Agreed(max_rank_tokens=num_tokens, all_ranks_decode=not is_mixed, stops=bool(stops))
