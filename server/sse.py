"""Server-sent events: one JSON object an event, and a response that ends when its client leaves."""

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.connection import while_connected

DONE = b"data: [DONE]\n\n"


def event(payload: Any) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


class EventStream(Response):
    """Runs `produce(stream)`, which calls `stream.write`. It is cancelled when the client leaves.

    The response begins with the first write: an error of `produce` before it can still become an error response.
    """

    media_type = "text/event-stream"

    def __init__(self, produce: Callable[["EventStream"], Awaitable[None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.has_begun = False
        self._produce = produce

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what is produced. Raises ClientDisconnect when the client leaves first."""
        self._send = send
        # Set by `server.protocol`: passing each event through the layers of the app would double what it costs.
        self._write_chunk: Callable[[bytes], bool] | None = scope.get("state", {}).get("write_chunk")
        await while_connected(receive, self._send_all())

    async def write(self, events: bytes) -> None:
        """Send whole events; waits while the client does not read."""
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        elif self._write_chunk is not None and self._write_chunk(events):
            return
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def _send_all(self) -> None:
        await self._produce(self)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
