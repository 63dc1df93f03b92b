"""Admission: `Places`, and which client loses a place to another when all are taken. Pure policy, no queues.

Otherwise one client's burst would fill the queue, and everybody else would get a 429 until it drains. So a client with
less than an equal share of the places still gets in: the client with the most places loses its youngest request, which
gets the 429 instead.

- There is no limit while there is room: a single client, or a proxy in front of all clients, may use every place. A
  fixed limit per client would waste places then, and two clients at three quarters each would still fill the queue.
- Afterwards the newcomer is at or below its share and the loser at or above its own, so the place cannot be taken back.
- A request whose answer has begun keeps its place. The choices of one HTTP request share a client and a connection, so
  all of them keep their places once one has begun.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.fair_queue import Path


def is_within_share(num_held: Mapping[str, int], client: str, num_more: int, num_places: int) -> bool:
    """Whether a client would hold at most an equal share of the places after taking `num_more`.

    `num_held` has the number of places of every client that holds any.
    """
    return num_held.get(client, 0) + num_more <= num_places // len(num_held.keys() | {client})


def choose_loser(holders: Sequence[tuple[Path, bool]], client: str) -> int | None:
    """Index of the request that gives its place to a new one of `client`; None if the new one must be refused.

    `holders` has, for every place, the path of its request and whether the answer to its HTTP request has begun, oldest
    request first. All places are taken.
    """
    num_held = Counter(path[0] for path, _ in holders)
    if not is_within_share(num_held, client, 1, len(holders)):
        return None
    most = max(num_held.values())
    losers = [index for index, (path, has_begun) in enumerate(holders) if num_held[path[0]] == most and not has_begun]
    return losers[-1] if losers else None


class NoPlaceError(Exception):
    """All places are taken, and the client holds its share of them."""


@dataclass(slots=True)
class _Holder:
    """`has_begun` is True once any request of the same client and connection has had an output."""

    path: Path
    has_begun: bool = False


class Places:
    """Who holds the places of an engine, oldest request first.

    With one HTTP process they are kept there, so that a refusal is immediate; with several, in the engine process.
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.num_taken = 0
        self.num_freed = 0  # requests that ended in whatever way; one that lost its place to another freed none
        self.num_by_client: Counter[str] = Counter()  # clients without a place are not in it
        self._holders: dict[str, _Holder] = {}

    def take(self, request_id: str, path: Path) -> str | None:
        """Give a request a place. Returns the id of the request that lost its own to it, or None.

        Raises:
            NoPlaceError: it must be refused.
        """
        loser = None
        if len(self._holders) >= self.num_places:
            ids = list(self._holders)
            index = choose_loser([(each.path, each.has_begun) for each in self._holders.values()], path[0])
            if index is None:
                raise NoPlaceError
            loser = ids[index]
            self._remove(loser)
        self.num_taken += 1
        self._holders[request_id] = _Holder(path)
        self.num_by_client[path[0]] += 1
        return loser

    def free(self, request_id: str) -> None:
        """The request is over. Does nothing if it holds no place."""
        if request_id in self._holders:
            self._remove(request_id)
            self.num_freed += 1

    def on_output(self, request_id: str) -> None:
        """The request has an output, so the answer to its HTTP request has begun."""
        holder = self._holders.get(request_id)
        if holder is not None and not holder.has_begun:
            for each in self._holders.values():
                each.has_begun = each.has_begun or each.path == holder.path

    def _remove(self, request_id: str) -> None:
        client = self._holders.pop(request_id).path[0]
        self.num_by_client[client] -= 1
        if not self.num_by_client[client]:
            del self.num_by_client[client]
