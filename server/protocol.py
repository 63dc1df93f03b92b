"""`GuardedProtocol`: uvicorn's HTTP protocol with a limit on the size of a request's head and on the time it takes.

Bodies have their limits in `server.body`. Uvicorn itself waits for a head for ever, and keeps all that comes.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024


class GuardedProtocol(HttpToolsProtocol):
    """Closes connections that bring no request, an endless one, or one so slowly that it must be meant ill."""

    def __init__(self, *, head_timeout_s: float, **parts: Any) -> None:
        super().__init__(**parts)
        self._head_timeout_s = head_timeout_s
        self._in_head = False
        self._num_head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there; it has to begin."""
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; what belongs to the head counts, but for the read in which it begins."""
        if self._in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"The head of the request has more than {MAX_HEAD_BYTES} bytes.")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._in_head, self._num_head_bytes = True, 0
        self._set_deadline()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head = False
        self._clear_deadline()
        super().on_headers_complete()

    def _set_deadline(self) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(self._head_timeout_s, self.transport.close)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
