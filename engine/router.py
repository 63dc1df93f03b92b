"""`Router`: which of several schedulers gets a request. Pure policy: no sockets, no clock.

Every scheduler has its own KV cache. A request goes where the fewest tokens are held by requests that run or wait,
minus the tokens at its beginning that a scheduler has seen last. So a shared prefix attracts requests, as long as its
scheduler is not ahead of the others by more than the prefix saves.
"""

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass

from engine.types import EngineRequest

_FIRST_TOKENS = 32  # prefixes of 32, 64, 128, ... tokens are remembered
_MAX_PREFIXES = 16_384


@dataclass(slots=True)
class _Route:
    scheduler: int
    num_tokens: int  # of the prompt and the answer so far


class Router:
    """Requests in flight at each of `num_schedulers`, which hold at most `max_requests` each."""

    def __init__(self, num_schedulers: int, max_requests: int) -> None:
        self._num_tokens = [0] * num_schedulers
        self._num_requests = [0] * num_schedulers
        self._max_requests = max_requests
        self._routes: dict[str, _Route] = {}
        self._prefixes: OrderedDict[bytes, int] = OrderedDict()
        self._last: tuple[list[int], int] | None = None  # a prompt and where it went

    def choose(self, request: EngineRequest) -> int:
        """The scheduler for a request, which it holds from now on.

        The choices of one request share the list of their prompt, and stay together.
        """
        prompt_ids = request.prompt_ids
        if len(self._num_tokens) == 1:
            scheduler = 0
        elif self._last is not None and self._last[0] is prompt_ids and self._has_place(self._last[1]):
            scheduler = self._last[1]
        else:
            scheduler = self._choose_for(request)
        self._last = (prompt_ids, scheduler)
        self._routes[request.request_id] = _Route(scheduler, len(prompt_ids))
        self._num_tokens[scheduler] += len(prompt_ids)
        self._num_requests[scheduler] += 1
        return scheduler

    def find(self, request_id: str) -> int | None:
        """The scheduler that holds a request; None if none does."""
        route = self._routes.get(request_id)
        return None if route is None else route.scheduler

    def on_tokens(self, request_id: str, num_tokens: int) -> None:
        """A request has got tokens."""
        route = self._routes.get(request_id)
        if route is not None:
            route.num_tokens += num_tokens
            self._num_tokens[route.scheduler] += num_tokens

    def on_end(self, request_id: str) -> None:
        """A request is over."""
        route = self._routes.pop(request_id, None)
        if route is not None:
            self._num_tokens[route.scheduler] -= route.num_tokens
            self._num_requests[route.scheduler] -= 1

    def _has_place(self, scheduler: int) -> bool:
        return self._num_requests[scheduler] < self._max_requests

    def _choose_for(self, request: EngineRequest) -> int:
        keys = _prefix_keys(request)
        num_known = [0] * len(self._num_tokens)
        for length, key in keys:  # ascending: the longest known prefix of each scheduler stays
            scheduler = self._prefixes.get(key)
            if scheduler is not None:
                num_known[scheduler] = length
        free = [each for each in range(len(num_known)) if self._has_place(each)] or list(range(len(num_known)))
        chosen = min(free, key=lambda each: (self._num_tokens[each] - num_known[each], self._num_requests[each]))
        for _, key in keys:
            self._prefixes[key] = chosen
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > _MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        return chosen


def _prefix_keys(request: EngineRequest) -> list[tuple[int, bytes]]:
    """Lengths and digests of the prefixes that are remembered; those with different salts share no cached pages."""
    prompt_ids, digest = request.prompt_ids, hashlib.blake2b(request.cache_salt.encode(), digest_size=16)
    keys, start, end = [], 0, _FIRST_TOKENS
    while end <= len(prompt_ids):
        digest.update(array("q", prompt_ids[start:end]).tobytes())
        keys.append((end, digest.copy().digest()))
        start, end = end, 2 * end
    return keys
