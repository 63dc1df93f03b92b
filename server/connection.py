"""A client's connection: `while_connected` ends work whose client leaves, `EventStream` sends server-sent events."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

Result = TypeVar("Result")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. It is cancelled, and waited for, when the client leaves. Read the request body before.

    Raises:
        ClientDisconnect: the client left first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_client_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
        del working, leaving  # else an error and this frame keep each other alive, and all that the work has read


async def _client_left(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


class ChunkWriter(Protocol):
    """What a stream uses of `server.protocol.Chunks`."""

    is_writable: bool
    """Whether parts may be written now: the client is there and reads."""

    @property
    def sends_chunks(self) -> bool:
        """Whether the current response has a chunked body."""

    def write(self, data: bytes) -> None:
        """Send a part of the body at once."""

    def write_soon(self, data: bytes) -> None:
        """Send a part of the body right after the current callback, together with those of other streams.

        Only while the task that writes the stream waits; else its next write may come before this one.
        """


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
        self.chunks: ChunkWriter | None = None
        """Takes events at once, without waiting. None until the response has begun, and where there is no such way."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what is produced. Raises ClientDisconnect when the client leaves first."""
        self._send = send
        self._state = scope.get("state", {})
        await while_connected(receive, self._send_all())

    async def write(self, events: bytes) -> None:
        """Send whole events; waits while the client does not read."""
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # Set by `server.protocol`: passing each event through the layers of the app would double what it costs.
            chunks: ChunkWriter | None = self._state.get("chunks")
            self.chunks = chunks if chunks is not None and chunks.sends_chunks else None
        elif self.chunks is not None and self.chunks.is_writable:
            self.chunks.write(events)
            return
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def _send_all(self) -> None:
        await self._produce(self)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
