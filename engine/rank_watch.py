"""`RankWatch`: decides from beats, last words and exits whether the ranks are well, and whose fault it is if not.

Ranks fail together: when one dies, the others lose their connections to it and fail a moment later. So after the first
sign the watch waits for a moment, and then blames, in this order: a rank that was killed, one that ended without a
word, the first one that failed and had not lost another, the first one that had. "First" goes by the clocks of hosts,
which may differ. Pure policy: no clock, no processes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.messages import EXITS_TOLD, Beat, Failed
from engine.process import describe_exit

TICK_S = 0.2
_SETTLE_TICKS = 3
_SILENT_TICKS = 18  # 3.6 s without a beat; beats come four times a second


@dataclass(frozen=True, slots=True)
class Cause:
    """Why the engine cannot go on; `is_setting` as in `Failed`."""

    message: str
    is_setting: bool = False


class RankWatch:
    """Tell it everything that happens, and call `tick` every `TICK_S` seconds.

    Time is counted in ticks: if the watching process itself is stopped for a while, the ranks seem no older after it.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._silent_ticks = dict.fromkeys(ranks, 0)
        self._has_loaded = False
        self._words: list[Failed] = []
        self._exits: dict[int, int] = {}
        self._num_ticks_of_failure = 0

    def on_beat(self, beat: Beat) -> None:
        """A rank's heartbeat."""
        self._silent_ticks[beat.rank] = 0

    def on_loaded(self) -> None:
        """All ranks serve. Before that a rank may hold up its beats: importing and loading block other threads."""
        self._has_loaded = True
        self._silent_ticks = dict.fromkeys(self._silent_ticks, 0)

    def on_failed(self, failed: Failed) -> None:
        """A rank's last word."""
        self._words.append(failed)

    def on_exit(self, rank: int, status: int) -> None:
        """A rank's process has ended; nobody told it to."""
        self._exits[rank] = status

    def tick(self) -> Cause | None:
        """Why the engine cannot go on, or None."""
        silent = []
        if self._has_loaded:
            for rank in self._silent_ticks:
                self._silent_ticks[rank] += 1
            silent = [rank for rank, ticks in self._silent_ticks.items() if ticks > _SILENT_TICKS]
        if self._words or self._exits:
            self._num_ticks_of_failure += 1
            return self._cause() if self._num_ticks_of_failure > _SETTLE_TICKS else None
        if silent:
            return Cause(f"rank {silent[0]} has sent no heartbeat for {_SILENT_TICKS * TICK_S:.1f} s")
        return None

    def _cause(self) -> Cause:
        silent_exits = {rank: status for rank, status in self._exits.items() if status not in EXITS_TOLD}
        if silent_exits:
            rank = min(silent_exits, key=lambda each: silent_exits[each])  # a signal is a negative status
            log_hint = "; its log says why" if silent_exits[rank] >= 0 else ""
            return Cause(f"the process of rank {rank} {describe_exit(silent_exits[rank])}{log_hint}")
        if self._words:
            first = min(self._words, key=lambda word: (word.has_lost_ranks, word.time_s))
            message = f"rank {first.rank}: {first.message}" if self._has_loaded else first.message
            return Cause(message, first.is_setting)
        return Cause(f"the process of rank {next(iter(self._exits))} failed; its log says why")
