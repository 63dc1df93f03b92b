"""`GuardedProtocol`: uvicorn's h11 protocol with limits on a request's head, and with OpenAI error bodies of its own.

`server.body` limits bodies. Uvicorn alone would wait for a head forever. We use h11 because, unlike httptools, it reads
the body of a request that offers an upgrade; upgrades are ignored, as RFC 9110 allows.
"""

import asyncio
import re
import uuid
from collections.abc import Callable
from typing import Any, ClassVar

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.errors import error_body

MAX_HEAD_BYTES = 64 * 1024
_ABSOLUTE = re.compile(rb"https?://[^/?]*(.*)", re.IGNORECASE)


class GuardedProtocol(H11Protocol):
    """Closes connections that send no request, an oversized head, or a head too slowly (slowloris)."""

    conn: "GuardedConnection"

    def __init__(
        self,
        *,
        head_timeout_s: float,
        together: "WrittenTogether",
        on_close: Callable[[], None] | None = None,
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        self._on_close = on_close
        self.conn = GuardedConnection(h11.SERVER, MAX_HEAD_BYTES)
        self._chunks = Chunks(self.conn, together)
        self._head_timeout_s = head_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self.app_state = {**self.app_state, "chunks": self._chunks}  # becomes the state of every request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._chunks.transport = transport
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting: the client is gone."""
        self._clear_deadline()
        self._chunks.is_writable = False
        super().connection_lost(exc)
        if self._on_close is not None:
            self._on_close()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self._chunks.is_writable = False
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has read enough."""
        self._chunks.is_writable = True
        super().resume_writing()

    def handle_events(self) -> None:
        """Parse what has arrived. A head, or the rest of a body that was answered already, must arrive in time."""
        super().handle_events()
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """Uvicorn calls this for a malformed request. The connection is closed, because its framing is lost."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            status, body = self.conn.describe_fault(msg)
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"x-request-id", uuid.uuid4().hex.encode()),
                (b"connection", b"close"),
            ]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """Accept no upgrade. Uvicorn's own method does not either, but logs two warnings."""
        return False

    def _watch_head(self) -> None:
        """Start the deadline unless it is running; stop it while a request is served."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._clear_deadline()
        elif self._deadline is None and self.timeout_keep_alive_task is None:
            self._deadline = self.loop.call_later(self._head_timeout_s, self.transport.close)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Chunks:
    """Parts of a connection's chunked bodies, written past h11 and uvicorn: a `server.connection.ChunkWriter`."""

    __slots__ = ("_connection", "_waiting", "_write_waiting_soon", "is_writable", "transport")

    def __init__(self, connection: "GuardedConnection", together: "WrittenTogether") -> None:
        self._connection = connection
        self._waiting = together.waiting
        self._write_waiting_soon = together.write_soon
        self.transport: asyncio.Transport
        self.is_writable = True

    @property
    def sends_chunks(self) -> bool:
        """Whether the current response has a chunked body."""
        return self._connection.sends_chunks

    def write(self, data: bytes) -> None:
        """Write a part at once."""
        self.transport.write(chunk_of(data))

    def write_soon(self, data: bytes) -> None:
        """Write a part right after the current callback; only while the task that answers waits."""
        waiting = self._waiting
        if not waiting:
            self._write_waiting_soon()
        waiting.append((self.transport, b"%x\r\n%b\r\n" % (len(data), data)))  # as `chunk_of`, once a token


class WrittenTogether:
    """Writes what all connections have got in one callback, such as the tokens of a step, right after it.

    Writing each as soon as it is ready would cost more, because the kernel wakes its reader in between. The order on a
    connection is kept if its task waits meanwhile: what wakes the task is scheduled after `write`, so it runs later.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[asyncio.Transport, bytes]] = []
        """What to write, and where to. Whoever adds the first entry calls `write_soon`."""

    def write_soon(self) -> None:
        """Write what waits right after the current callback."""
        asyncio.get_running_loop().call_soon(self._write_all)

    def _write_all(self) -> None:
        waiting = self.waiting.copy()
        self.waiting.clear()
        for transport, data in waiting:
            if not transport.is_closing():  # its client may have left meanwhile, and then uvloop raises
                transport.write(data)


class GuardedConnection(h11.Connection):
    """h11's parser, stricter where RFC 9112 lets a server choose. Remembers what the client did wrong."""

    _WORDS: ClassVar = {
        431: (f"the head of the request has more than {MAX_HEAD_BYTES} bytes", "headers_too_large"),
        501: ("chunked is the only supported transfer coding", "unsupported_transfer_encoding"),
        505: ("this server speaks HTTP/1.1 and HTTP/1.0", "unsupported_http_version"),
    }
    _fault: h11.RemoteProtocolError | None = None
    sends_chunks = False

    def next_event(self) -> Any:
        """The next event; a target in absolute form becomes the path that routes know.

        Raises:
            h11.RemoteProtocolError: the request is malformed, ambiguous or too large.
        """
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                _check_head(event)
                event = _with_path(event)
        except h11.RemoteProtocolError as error:
            self._fault = error
            raise
        return event

    def send(self, event: Any) -> Any:
        """The bytes of an event. Chunks of a stream bypass h11, which takes 10 us for each and changes no state."""
        if self.sends_chunks and type(event) is h11.Data:
            return chunk_of(event.data) if event.data else b""
        output = super().send(event)
        self.sends_chunks = type(event) is h11.Response and b"\r\ntransfer-encoding: chunked\r\n" in output.lower()
        return output

    def describe_fault(self, fallback: str) -> tuple[int, bytes]:
        """Status and OpenAI error body for the fault."""
        fault = self._fault
        status = fault.error_status_hint if fault is not None else 400
        if status not in self._WORDS:
            status = 400
        reason = str(fault or fallback).partition(": bytearray(")[0][:200]  # h11 shows the bytes of a bad chunk
        message, code = self._WORDS.get(status, (f"the request is not valid HTTP/1.1: {reason}", "invalid_http"))
        return status, orjson.dumps(error_body(message, "invalid_request_error", code=code))


def chunk_of(data: bytes) -> bytes:
    """A chunk of a chunked body; no data would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _check_head(request: h11.Request) -> None:
    """Refuse what h11 lets pass: an oversized head in one packet, other versions of HTTP, and two lengths for one body.

    Two lengths are dangerous because a proxy in front may see the body end elsewhere (request smuggling).

    Raises:
        h11.RemoteProtocolError: the request has one of these.
    """
    num_bytes = len(request.method) + len(request.target) + sum(len(k) + len(v) + 4 for k, v in request.headers)
    if num_bytes > MAX_HEAD_BYTES:
        raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
    if not request.http_version.startswith(b"1."):
        raise h11.RemoteProtocolError("another version of HTTP", error_status_hint=505)
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
        raise h11.RemoteProtocolError("Transfer-Encoding with Content-Length, or in HTTP/1.0, is ambiguous")


def _with_path(request: h11.Request) -> h11.Request:
    """Reduce a target in absolute form, which clients send to proxies, to `/path?query`."""
    found = _ABSOLUTE.fullmatch(request.target)
    if found is None:
        return request
    target = found[1] if found[1].startswith(b"/") else b"/" + found[1]
    return h11.Request(method=request.method, target=target, headers=request.headers, http_version=request.http_version)
