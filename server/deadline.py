"""The deadline of a request: its client gives it so many seconds, by the header `X-Request-Timeout` or a field.

The time of the body, the queue and the prompt counts. An answer that is not complete by then ends with an error, and
the engine works on it no longer.
"""

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from server.errors import BadRequest, DeadlineExceeded
from server.request_group import RequestGroup
from server.schema.common import MAX_TIMEOUT_S, AnswerRequest

HEADER = "X-Request-Timeout"
PARAMETER: dict[str, Any] = {
    "name": HEADER,
    "in": "header",
    "description": "Seconds after which the answer ends with an error",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
}
"""The header in the OpenAPI document."""


def timeout_of(request: Request, wire: AnswerRequest) -> float | None:
    """Seconds that the client gives its request, the shorter time if it names two; None if it names none.

    Raises:
        BadRequest: the header is no number of seconds.
    """
    times_s = [] if wire.timeout_s is None else [wire.timeout_s]
    given = request.headers.get(HEADER)
    if given is not None:
        try:
            time_s = float(given)
        except ValueError:
            time_s = math.nan
        if not 0 < time_s <= MAX_TIMEOUT_S:
            message = f"the header {HEADER} must be a number of seconds above 0, at most {MAX_TIMEOUT_S:g}"
            raise BadRequest(message, param=HEADER)
        times_s.append(time_s)
    return min(times_s, default=None)


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a request that came at `start_s` of the monotonic clock; with None there is none."""

    timeout_s: float | None
    start_s: float

    @contextmanager
    def limits(self, group: RequestGroup) -> Iterator[None]:
        """Fail the group at the deadline. Raises DeadlineExceeded if that is over. The event loop must run."""
        if self.timeout_s is None:
            yield
            return
        error = DeadlineExceeded(
            f"the answer was not complete after {self.timeout_s:g} s, the time that the request gave it"
        )
        left_s = self.start_s + self.timeout_s - time.monotonic()
        if left_s <= 0:
            raise error
        timer = asyncio.get_running_loop().call_later(left_s, group.fail, error)
        try:
            yield
        finally:
            timer.cancel()
