"""Admission when the queue is full: which client loses a place to another. Pure policy on numbers, no queues.

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
