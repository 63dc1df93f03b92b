"""Whose turn it is: the order of waiting requests, who gives way, and shares of a budget. Pure policy; holds no pages.

A client is who asks (`EngineRequest.client`); its requests may come over several connections. Turns are shared between
clients first, then between the connections of a client:

next to run      of the client that runs the fewest requests; of its connection that runs the fewest; the oldest
first to give    of the client that runs the most requests; of its connection that runs the most; the youngest
way

Nobody starves: a client that runs nothing is next as soon as its oldest request is the oldest of all such clients, and
later arrivals cannot pass it. With one client and one connection this is first come, first served.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping

from engine.sequence import Sequence

Path = tuple[str, ...]


class Shares:
    """How many requests each client, and each of its connections, runs now."""

    def __init__(self, running: Iterable[Sequence]) -> None:
        self._counts = Counter(prefix for seq in running for prefix in _prefixes(seq.path))

    def of(self, path: Path) -> tuple[int, ...]:
        """Requests that run under the client, then under the connection."""
        return tuple(self._counts[prefix] for prefix in _prefixes(path))

    def excess(self, path: Path, other: Path) -> int:
        """How many more requests `path` runs than `other`, compared where they part; 0 if they are the same."""
        for mine, its in zip(_prefixes(path), _prefixes(other), strict=True):
            if mine != its:
                return self._counts[mine] - self._counts[its]
        return 0

    def first_to_give_way(self, running: Iterable[Sequence]) -> Sequence:
        """The youngest request of whoever runs the most."""
        return max(running, key=lambda seq: (self.of(seq.path), seq.arrival))


class FairQueue:
    """Requests that wait. Iterates over them in order of arrival."""

    def __init__(self) -> None:
        self._by_path: dict[Path, deque[Sequence]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted((seq for waiting in self._by_path.values() for seq in waiting), key=lambda s: s.arrival))

    def put(self, seq: Sequence) -> None:
        """A new request, the youngest of all."""
        self._by_path.setdefault(seq.path, deque()).append(seq)
        self._num_waiting += 1

    def put_back(self, seq: Sequence) -> None:
        """A request that ran and had to give way; it is older than those of its connection that wait."""
        self._by_path.setdefault(seq.path, deque()).appendleft(seq)
        self._num_waiting += 1

    def remove(self, seq: Sequence) -> None:
        """Take out a request that waits. Raises ValueError if it does not."""
        waiting = self._by_path.get(seq.path, deque())
        waiting.remove(seq)
        self._num_waiting -= 1
        if not waiting:
            del self._by_path[seq.path]

    def first(self, shares: Shares) -> Sequence:
        """The next to run. Raises ValueError if nobody waits."""
        heads = (waiting[0] for waiting in self._by_path.values())
        return min(heads, key=lambda seq: (shares.of(seq.path), seq.arrival))


def split_evenly(demands: Mapping[str, int], budget: int) -> dict[str, int]:
    """What each client gets of a budget: equal shares, and what one does not need goes to the others.

    Of a budget above 0 the first client gets at least 1.
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
