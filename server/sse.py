"""Server-sent events: one JSON object an event, and a response that ends when its client leaves."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.connection import while_connected

DONE = b"data: [DONE]\n\n"


def event(payload: Any) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


class ChunkWriter(Protocol):
    """The part of `server.protocol.GuardedProtocol` that a stream uses."""

    @property
    def can_write_chunk(self) -> bool:
        """`write_chunk` may be called."""

    def write_chunk(self, data: bytes) -> None:
        """Send a part of the body at once."""


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
        self._chunks: ChunkWriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what is produced. Raises ClientDisconnect when the client leaves first."""
        self._send = send
        # Set by `server.protocol`: passing each event through the layers of the app would double what it costs.
        self._chunks = scope.get("state", {}).get("chunks")
        await while_connected(receive, self._send_all())

    async def write(self, events: bytes) -> None:
        """Send whole events; waits while the client does not read."""
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        elif self.can_write_now:
            self.write_now(events)
            return
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    @property
    def can_write_now(self) -> bool:
        """The response has begun and its client reads it."""
        return self.has_begun and self._chunks is not None and self._chunks.can_write_chunk

    def write_now(self, events: bytes) -> None:
        """Like `write`, without waiting; only if `can_write_now`."""
        if self._chunks is not None:
            self._chunks.write_chunk(events)

    async def _send_all(self) -> None:
        await self._produce(self)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
