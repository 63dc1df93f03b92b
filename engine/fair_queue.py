"""Fair queueing: the order of waiting requests, which request is preempted, and shares of a budget. Pure policy.

`EngineRequest.client` names the client; its requests may come over several connections. Turns are shared between
clients first, then between the connections of a client:

next to run      the oldest request of the client, and then of its connection, that runs the fewest requests
first to yield   the youngest request of the client, and then of its connection, that runs the most requests

Nobody starves: among clients that run nothing, the one with the oldest request is next, and later arrivals cannot pass
it. With one client and one connection this is first come, first served.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.sequence import Sequence  # needs numpy, which commands like --help need not wait for

Path = tuple[str, ...]


class Shares:
    """How many requests each client and each of its connections runs now."""

    def __init__(self, running: Iterable["Sequence"]) -> None:
        self._counts = Counter(prefix for seq in running for prefix in _prefixes(seq.path))

    def of(self, path: Path) -> tuple[int, ...]:
        """Number of running requests of the client, then of the connection."""
        return tuple(self._counts[prefix] for prefix in _prefixes(path))

    def excess(self, path: Path, other: Path) -> int:
        """How many more requests `path` runs than `other`, by client if the clients differ, else by connection."""
        for mine, its in zip(_prefixes(path), _prefixes(other), strict=True):
            if mine != its:
                return self._counts[mine] - self._counts[its]
        return 0

    def first_to_give_way(self, running: Iterable["Sequence"]) -> "Sequence":
        """The youngest request of the client and connection that run the most."""
        return max(running, key=lambda seq: (self.of(seq.path), seq.arrival))


class FairQueue:
    """Waiting requests. Iterates over them in order of arrival."""

    def __init__(self) -> None:
        self._by_path: dict[Path, deque[Sequence]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator["Sequence"]:
        return iter(sorted((seq for waiting in self._by_path.values() for seq in waiting), key=lambda s: s.arrival))

    def put(self, seq: "Sequence") -> None:
        """Add a new request, the youngest of all."""
        self._by_path.setdefault(seq.path, deque()).append(seq)
        self._num_waiting += 1

    def put_back(self, seq: "Sequence") -> None:
        """Put back a preempted request, in front of the waiting requests of its connection, which are all younger."""
        self._by_path.setdefault(seq.path, deque()).appendleft(seq)
        self._num_waiting += 1

    def remove(self, seq: "Sequence") -> None:
        """Take out a waiting request. Raises ValueError if it is not in the queue."""
        waiting = self._by_path.get(seq.path, deque())
        waiting.remove(seq)
        self._num_waiting -= 1
        if not waiting:
            del self._by_path[seq.path]

    def first(self, shares: Shares) -> "Sequence":
        """The next to run. Raises ValueError if nobody waits."""
        heads = (waiting[0] for waiting in self._by_path.values())
        return min(heads, key=lambda seq: (shares.of(seq.path), seq.arrival))


def split_evenly(demands: Mapping[str, int], budget: int) -> dict[str, int]:
    """What each client gets of a budget: equal shares, and what one does not need goes to the others.

    If the budget is above 0, the first client gets at least 1.
    """
    granted = dict.fromkeys(demands, 0)
    while budget and (open_demands := [client for client in demands if granted[client] < demands[client]]):
        share = max(1, budget // len(open_demands))
        for client in open_demands:
            more = min(share, demands[client] - granted[client], budget)
            granted[client] += more
            budget -= more
    return granted


def _prefixes(path: Path) -> list[Path]:
    return [path[: length + 1] for length in range(len(path))]
