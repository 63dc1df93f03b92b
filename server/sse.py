"""Server-sent events: one JSON object an event, and a response that notices when its client leaves."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.connection import while_connected

DONE = b"data: [DONE]\n\n"


def event(payload: Any) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


class EventStream(Response):
    """Sends a first event and those of a generator, which is closed when it ends, fails, or its client leaves.

    The generator must have begun (with the first event): closing one that has not would skip its clean-up.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the generator or the client ends."""
        with suppress(ClientDisconnect):
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
