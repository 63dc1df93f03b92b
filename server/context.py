"""`ServerContext`: what every route needs. `Gate`: whether new work is admitted, and which requests are in flight."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from engine.admission import is_within_share
from engine.types import CallOff, EngineInfo
from server.config import ServerConfig
from server.convert import Converter
from server.errors import Aborted, ModelNotFound, TooManyRequests, Unavailable
from server.key_limits import KeyLimits
from server.keys import Keyring
from server.lanes import Lanes
from server.metrics import Metrics
from server.queue_speed import QueueSpeed
from server.request_group import Engine, RequestGroup
from server.request_log import RequestLog
from server.responses.store import ResponseStore
from server.stall import StallWatch
from server.tally import Gauge, Tally

SHUT_DOWN = "the service has shut down before this request was finished"


class Gate:
    """Knows the requests in flight in this process. After `drain` it admits nothing new."""

    def __init__(self, tally: Tally, num_held_by_client: Callable[[], Mapping[str, int]] | None = None) -> None:
        """`num_held_by_client` returns the places held in the whole service; None if this is its only process."""
        self.draining = False
        self._tally = tally
        self._num_held_by_client = num_held_by_client
        self._groups: set[RequestGroup] = set()
        self._speed = QueueSpeed()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_inflight(self) -> int:
        """Requests being served."""
        return len(self._groups)

    @property
    def num_inflight_everywhere(self) -> int:
        """Requests being served by all HTTP processes."""
        return self._tally.sum_gauge(Gauge.IN_FLIGHT)

    @property
    def num_by_client(self) -> Counter[str]:
        """Requests at the engine of every client that has any; every choice and prompt counts."""
        counts: Counter[str] = Counter()
        for group in self._groups:
            counts[group.client] += group.num_unfinished
        if self._num_held_by_client is not None:
            counts |= Counter(self._num_held_by_client())  # the larger: the engine learns of new requests a step later
        return +counts

    @contextmanager
    def admitted(self, group: RequestGroup) -> Iterator[None]:
        """Hold a place while a request is served. Raises Unavailable while draining."""
        if self.draining:
            raise Unavailable("the service is shutting down: send the request elsewhere, or again later")
        self._groups.add(group)
        self._tally.set_gauge(Gauge.IN_FLIGHT, len(self._groups))
        self._idle.clear()
        num_places = group.num_requests
        try:
            yield
        except TooManyRequests:
            num_places = 0  # it was refused, so it held no place
            raise
        finally:
            self._groups.discard(group)
            self._tally.set_gauge(Gauge.IN_FLIGHT, len(self._groups))
            if self._num_held_by_client is None:  # else the engine tells, for the whole service
                self.on_freed(num_places)
            if not self._groups:
                self._idle.set()

    def on_freed(self, num_places: int) -> None:
        """Places at the engine have come free."""
        self._speed.on_free(num_places, time.monotonic())

    def with_retry_after(self, error: TooManyRequests) -> TooManyRequests:
        """The error, with the time until a place may be free."""
        error.retry_after_s = self._speed.retry_after_s(time.monotonic())
        return error

    def drain(self) -> None:
        """Take no new work."""
        self.draining = True

    def cut(self) -> None:
        """End what is still in flight, each request with an error."""
        for group in self._groups:
            group.fail(Unavailable(SHUT_DOWN))

    def call_off(self, call: CallOff) -> None:
        """End the requests that are meant, each with an error."""
        for group in self._groups:
            is_named = call.names is None or not group.names.isdisjoint(call.names)
            if is_named and call.owner in (None, group.owner):
                group.fail(Aborted("the request was aborted"))

    async def wait_idle(self) -> None:
        """Return when no request is in flight."""
        await self._idle.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerContext:
    """Shared by all routes; lives in `app.state.context`."""

    engine: Engine
    config: ServerConfig
    converter: Converter
    metrics: Metrics
    gate: Gate
    lanes: Lanes
    stall: StallWatch
    request_log: RequestLog
    served_names: tuple[str, ...]
    response_store: ResponseStore | None  # of /v1/responses
    started_s: float
    key_limits: KeyLimits
    keyring: Keyring

    def model_name(self, asked: str | None) -> str:
        """The served name a request means; the first one if it names none. Raises ModelNotFound."""
        if asked is None:
            return self.served_names[0]
        if asked not in self.served_names:
            known = ", ".join(self.served_names)
            raise ModelNotFound(f"the model '{asked[:100]}' is not served here: known is {known}", param="model")
        return asked

    def ready_info(self, num_requests: int, client: str) -> EngineInfo:
        """The engine's facts, for a client that is about to send it `num_requests` requests.

        The engine decides in the end (`engine.admission`); asking first saves tokenizing a prompt that it would refuse.

        Raises:
            Unavailable: it takes no work now.
            TooManyRequests: it has no room for them, and the client holds its share of the places.
        """
        if reason := self.why_not_ready():
            raise Unavailable(reason)
        info = self.engine.info
        if info is None:
            raise Unavailable("the model is still loading")
        num_held = self.gate.num_by_client
        is_full = num_requests <= info.max_requests < num_held.total() + num_requests
        if is_full and not is_within_share(num_held, client, num_requests, info.max_requests):
            error = TooManyRequests(
                f"the queue is full: {num_held.total()} requests are running or waiting, "
                f"at most {info.max_requests} may be; try again later"
            )
            raise self.gate.with_retry_after(error)
        return info

    def why_not_ready(self) -> str | None:
        """None when ready, else the reason, in words that clients may see."""
        if self.gate.draining:
            return "the service is shutting down"
        if reason := self.why_not_alive():
            return reason
        if not self.engine.ready:
            return "the model is still loading"
        return self.stall.check()

    def why_not_alive(self) -> str | None:
        """None while the engine's process is there and, once loaded, shows signs of life."""
        if self.engine.failure is not None or not self.engine.alive:
            return "the engine has stopped"
        if self.engine.ready and self.engine.heartbeat_age_s > self.config.heartbeat_timeout:
            return f"the engine has sent no heartbeat for {self.engine.heartbeat_age_s:.0f} s"
        return None
