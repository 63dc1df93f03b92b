"""Ranks as threads of one process: they meet at every collective call, and a rank that stays away is an error."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
MEETING_TIMEOUT_S = 30.0
_here = threading.local()


class RankGroup:
    """Meeting point of `size` ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=MEETING_TIMEOUT_S)
        self.board: list[Any] = [None] * size


class Rank:
    """One rank's view of its group, as a process group has it."""

    group_name = "experts"

    def __init__(self, group: RankGroup, index: int) -> None:
        self.group, self.index = group, index

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.group.size

    def exchange(self, value: T) -> list[T]:
        """Everybody's value, in rank order."""
        self.group.board[self.index] = value
        self.group.barrier.wait()
        everybody = list(self.group.board)
        self.group.barrier.wait()
        return everybody


def this_rank() -> Rank:
    """The rank whose thread asks, for libraries that find their group by themselves."""
    rank: Rank = _here.rank
    return rank


def run_ranks(size: int, work: Callable[[Rank], T]) -> list[T]:
    """`work` on every rank at once; results in rank order. The first failure is raised."""
    group = RankGroup(size)
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            _here.rank = Rank(group, index)
            results[index] = work(_here.rank)
        except BaseException as error:  # handed to the caller below
            failures.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:  # those that waited for a rank that had failed say nothing about why
        raise min(failures, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return results
