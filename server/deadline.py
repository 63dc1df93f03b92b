"""The deadline of a request: its client gives it so many seconds, by the header `X-Request-Timeout` or a field.

It runs from the head of the request on, so the body, the queue and the prompt count. An answer that is not complete by
then ends with an error, and nothing more is done for it. The field is known only once the body has been parsed.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from server.errors import BadRequest, DeadlineExceeded
from server.request_group import RequestGroup
from server.schema.common import MAX_TIMEOUT_S

HEADER = "X-Request-Timeout"
PARAMETER: dict[str, Any] = {
    "name": HEADER,
    "in": "header",
    "description": "Seconds after which the answer ends with an error",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
}
"""The header in the OpenAPI document."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a request that came at `start_s` of the monotonic clock; with None there is none."""

    timeout_s: float | None
    start_s: float

    @classmethod
    def from_now(cls, request: Request) -> "Deadline":
        """The deadline of a request that comes now, as far as its header tells. Raises BadRequest for no such time."""
        return cls(_timeout_of_header(request), time.monotonic())

    def shortened(self, timeout_s: float | None) -> "Deadline":
        """The shorter of this time and another, which may be None for none."""
        given = [time_s for time_s in (self.timeout_s, timeout_s) if time_s is not None]
        return replace(self, timeout_s=min(given, default=None))

    @asynccontextmanager
    async def limits_task(self) -> AsyncIterator[None]:
        """Cancel what the current task awaits inside, at the deadline. Raises DeadlineExceeded if that is over."""
        try:
            async with asyncio.timeout(self._left_s()) as limit:
                yield
        except TimeoutError:
            if limit.expired():
                raise self._error() from None
            raise

    @contextmanager
    def limits_group(self, group: RequestGroup) -> Iterator[None]:
        """Fail the group at the deadline. Raises DeadlineExceeded if that is over. The event loop must run."""
        left_s = self._left_s()
        if left_s is None:
            yield
            return
        timer = asyncio.get_running_loop().call_later(left_s, lambda: group.fail(self._error()))
        try:
            yield
        finally:
            timer.cancel()

    def _left_s(self) -> float | None:
        """Seconds that are left. Raises DeadlineExceeded if none are."""
        if self.timeout_s is None:
            return None
        left_s = self.start_s + self.timeout_s - time.monotonic()
        if left_s <= 0:
            raise self._error()
        return left_s

    def _error(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"the answer was not complete after {self.timeout_s:g} s, the time that the request gave it"
        )


def _timeout_of_header(request: Request) -> float | None:
    given = request.headers.get(HEADER)
    if given is None:
        return None
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        message = f"the header {HEADER} must be a number of seconds above 0, at most {MAX_TIMEOUT_S:g}"
        raise BadRequest(message, param=HEADER)
    return timeout_s
