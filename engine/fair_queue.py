"""Fair queueing: the order of waiting requests, which request is preempted, and shares of a budget. Pure policy.

`EngineRequest.client` names the client; its requests may come over several connections. Turns are shared between
clients first, then between the connections of a client:

next to run      of the client that runs the fewest requests: its lowest priority number, then the connection that runs
                 the fewest, then the oldest
first to yield   of the client that runs the most requests: its highest priority number, then the connection that runs
                 the most, then the youngest

Nobody starves another: among clients that run nothing, the one whose next request is the oldest is next, and later
arrivals cannot pass it. Priorities order a client's own requests only. With one client, one connection and one priority
this is first come, first served.
"""

from bisect import insort
from collections import Counter
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
        """The youngest of the least urgent requests of the client, and then of the connection, that runs the most."""
        return max(running, key=self._order)

    def _order(self, seq: "Sequence") -> tuple[int, int, int, int]:
        """Requests of a client in the order in which they run, and clients by what they run."""
        of_client, of_connection = self.of(seq.path)
        return of_client, seq.priority, of_connection, seq.arrival

    def next_to_run(self, heads: Iterable["Sequence"]) -> "Sequence":
        """The next of the first requests of connections. Raises ValueError if there is none."""
        best: dict[str, Sequence] = {}
        for seq in heads:
            if seq.client not in best or self._order(seq) < self._order(best[seq.client]):
                best[seq.client] = seq
        return min(best.values(), key=lambda seq: (self.of(seq.path), seq.arrival))


class FairQueue:
    """Waiting requests. Iterates over them in order of arrival."""

    def __init__(self) -> None:
        self._by_path: dict[Path, list[Sequence]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator["Sequence"]:
        return iter(sorted((seq for waiting in self._by_path.values() for seq in waiting), key=lambda s: s.arrival))

    def put(self, seq: "Sequence") -> None:
        """Add a new request, or a preempted one, in front of the younger ones of its connection and priority."""
        insort(self._by_path.setdefault(seq.path, []), seq, key=lambda each: (each.priority, each.arrival))
        self._num_waiting += 1

    def remove(self, seq: "Sequence") -> None:
        """Take out a waiting request. Raises ValueError if it is not in the queue."""
        waiting = self._by_path.get(seq.path, [])
        waiting.remove(seq)
        self._num_waiting -= 1
        if not waiting:
            del self._by_path[seq.path]

    def first(self, shares: Shares) -> "Sequence":
        """The next to run. Raises ValueError if nobody waits."""
        return shares.next_to_run(waiting[0] for waiting in self._by_path.values())


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
