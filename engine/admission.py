"""Who gets a place when all are taken. Pure policy: knows requests by number, and nothing of queues or processes.

Without it, one client's burst fills the queue, and everybody else gets a 429 until it drains. So a client that holds
less than an equal share of the places still gets in: the client that holds the most loses its youngest request, which
gets the 429 instead.

- Nobody pays while there is room: a client that is alone, or a proxy in front of all clients, may use every place. A
  fixed limit per client would leave places empty then, and two clients at a limit of three quarters still fill them.
- The newcomer ends at or below its share and the loser above or at its own, so nobody can take the place back.
- A request whose answer has begun is never taken back. The answers of one HTTP request share a client and a connection,
  so none of them is, once one has begun.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from engine.fair_queue import Path


def is_within_share(num_held: Mapping[str, int], client: str, num_more: int, num_places: int) -> bool:
    """Whether a client that takes `num_more` of the places holds at most an equal share of them then.

    `num_held` counts the places of every client that holds any.
    """
    return num_held.get(client, 0) + num_more <= num_places // len(num_held.keys() | {client})


def choose_loser(holders: Sequence[tuple[Path, bool]], client: str) -> int | None:
    """Index of the request that gives its place to a new one of `client`; None if the new one must be refused.

    `holders` has the path of the request in every place, the oldest first, and whether its HTTP request has been
    answered in part. All places are taken.
    """
    num_held = Counter(path[0] for path, _ in holders)
    if not is_within_share(num_held, client, 1, len(holders)):
        return None
    most = max(num_held.values())
    losers = [index for index, (path, has_begun) in enumerate(holders) if num_held[path[0]] == most and not has_begun]
    return losers[-1] if losers else None
