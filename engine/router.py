"""`Router`: which of several schedulers gets a request. Pure policy: no sockets, no clock.

Every scheduler has its own KV cache and runs `max_num_seqs` requests at a time. One that has a seat free comes before
those where a request would wait. Among equals a request goes where the fewest tokens are held by requests that run or
wait, minus the tokens at its beginning that a scheduler has seen last. So a shared prefix attracts requests, as long as
its scheduler is not ahead of the others by more than the prefix saves.

With several HTTP processes each has a router; `engine.loads` tells it what all of them have sent.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.loads import Loads
from engine.types import EngineOutput, EngineRequest

_FIRST_TOKENS = 32  # prefixes of 32, 64, 128, ... tokens are remembered
_MAX_PREFIXES = 16_384


@dataclass(slots=True)
class _Route:
    scheduler: int
    num_tokens: int  # of the prompt and the answer so far


class Router:
    """Requests in flight at each of `num_schedulers`, which run at most `max_running` and hold `max_requests` each."""

    def __init__(self, num_schedulers: int, *, max_running: int, max_requests: int, loads: Loads | None = None) -> None:
        """`loads` is that of all HTTP processes; None if there is one."""
        self.held: list[Mapping[str, int]] = [{} for _ in range(num_schedulers)]
        """Places of each client at each scheduler, where schedulers keep the places."""
        self.loads = loads or Loads(num_schedulers)
        self._num_schedulers = num_schedulers
        self._limits = (max_running, max_requests)
        self._routes: dict[str, _Route] = {}
        self._prefixes: OrderedDict[bytes, int] = OrderedDict()
        self._last: tuple[list[int], int] | None = None  # a prompt and where it went

    def choose(self, request: EngineRequest) -> int:
        """The scheduler for a request, which it holds from now on.

        The choices of one request share the list of their prompt, and stay together.
        """
        prompt_ids = request.prompt_ids
        scheduler = 0
        if self._num_schedulers > 1:
            candidates = self._candidates(request.client)
            if self._last is not None and self._last[0] is prompt_ids and self._last[1] in candidates:
                scheduler = self._last[1]
            else:
                scheduler = self._choose_among(candidates, request)
        self._last = (prompt_ids, scheduler)
        self._routes[request.request_id] = _Route(scheduler, len(prompt_ids))
        self.loads.add(scheduler, num_requests=1, num_tokens=len(prompt_ids))
        return scheduler

    def find(self, request_id: str) -> int | None:
        """The scheduler that holds a request; None if none does."""
        route = self._routes.get(request_id)
        return None if route is None else route.scheduler

    def on_outputs(self, scheduler: int, token_names: Sequence[str], outputs: Sequence[EngineOutput]) -> None:
        """A step of a scheduler has brought one token for each of `token_names`, and these outputs."""
        if self._num_schedulers > 1:
            num_new, routes = 0, self._routes
            for name in token_names:
                if (route := routes.get(name)) is not None:
                    route.num_tokens += 1
                    num_new += 1
            for output in outputs:
                if (route := routes.get(output.request_id)) is not None:
                    route.num_tokens += len(output.token_ids)
                    num_new += len(output.token_ids)
            self.loads.add(scheduler, num_tokens=num_new)
        for output in outputs:
            if output.finish_reason is not None:
                self.on_end(output.request_id)

    def on_end(self, request_id: str) -> None:
        """A request is over."""
        route = self._routes.pop(request_id, None)
        if route is not None:
            self.loads.add(route.scheduler, num_requests=-1, num_tokens=-route.num_tokens)

    def _candidates(self, client: str) -> list[int]:
        """Schedulers with a seat free, else with a place free, else where the client holds the fewest places."""
        num_requests = self.loads.num_requests()
        for limit in self._limits:
            free = [each for each, number in enumerate(num_requests) if number < limit]
            if free:
                return free
        num_held = [held.get(client, 0) for held in self.held]
        return [each for each, number in enumerate(num_held) if number == min(num_held)]

    def _choose_among(self, candidates: Sequence[int], request: EngineRequest) -> int:
        keys = _prefix_keys(request)
        num_known = [0] * self._num_schedulers
        for length, key in keys:  # ascending: the longest known prefix of each scheduler stays
            scheduler = self._prefixes.get(key)
            if scheduler is not None:
                num_known[scheduler] = length
        num_tokens, num_requests = self.loads.num_tokens(), self.loads.num_requests()

        def cost(scheduler: int) -> tuple[int, int, int]:
            turn = (scheduler - self.loads.own_row) % self._num_schedulers  # processes begin at different schedulers
            return num_tokens[scheduler] - num_known[scheduler], num_requests[scheduler], turn

        chosen = min(candidates, key=cost)
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
