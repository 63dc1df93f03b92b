"""`RankReports`: what the ranks of an engine tell an HTTP process, as if the engine were one rank. Pure policy."""

from collections.abc import Collection

import msgspec

from engine.config import EngineConfig
from engine.messages import Beat, Ready
from engine.types import EngineInfo, EngineStats, ExpertLoad, sum_stats


class RankReports:
    """Tell it every beat and every `Ready` of the ranks that this process hears."""

    def __init__(self, config: EngineConfig, ranks: Collection[int]) -> None:
        self._config = config
        self._infos: dict[int, EngineInfo] = {}
        self._stats: dict[int, EngineStats] = {}
        self._loop_age_s = dict.fromkeys(ranks, 0.0)
        self._have_beaten: set[int] = set()
        self.expert_load: ExpertLoad | None = None

    @property
    def loop_age_s(self) -> float:
        """Seconds since the slowest rank began its current step, as of its last beat."""
        return max(self._loop_age_s.values())

    def stats(self) -> EngineStats | None:
        """The sums over the ranks that schedule; None before the first beat of a loaded one."""
        return sum_stats(self._stats.values()) if self._stats else None

    def on_beat(self, beat: Beat) -> None:
        """A rank's heartbeat."""
        self._have_beaten.add(beat.rank)
        self._loop_age_s[beat.rank] = beat.loop_age_s
        self.expert_load = beat.expert_load or self.expert_load
        if beat.stats is not None:
            self._stats[beat.rank] = beat.stats

    def on_ready(self, ready: Ready) -> None:
        """A rank has loaded."""
        self._infos[ready.rank] = ready.info

    def info(self) -> EngineInfo | None:
        """The engine's facts once all ranks are ready, within the limits of the smallest; None before.

        A rank counts once this process has heard a heartbeat of it, too. ZMQ aborts a process that has no file left
        when a rank connects, so all connections must be there before clients take the files.
        """
        if min(len(self._infos), len(self._have_beaten)) < len(self._loop_age_s):
            return None
        num_ranks, infos = self._config.num_ranks, self._infos.values()
        num_caches = self._config.data_parallel_size  # tensor-parallel ranks have the same pages
        if num_ranks == 1:
            return self._infos[0]
        return msgspec.structs.replace(
            self._infos[0],
            max_model_len=min(info.max_model_len for info in infos),
            num_pages=num_caches * min(info.num_pages for info in infos),
            num_kv_tokens=num_caches * min(info.num_kv_tokens for info in infos),
            max_requests=num_caches * self._config.max_requests,
            device=f"{num_ranks} ranks ({self._infos[0].device})",
        )
