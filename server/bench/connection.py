"""`Connection`: one keep-alive HTTP/1.1 connection, and a pool of them. Timestamps are taken when bytes arrive."""

import asyncio
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from server.bench.errors import BenchError, RequestFailed
from server.bench.http11 import ResponseReader
from server.tls import tls_failure

OnBody = Callable[[bytes, float], None]
_DEFAULT_PORTS = {"http": 80, "https": 443}
_VISIBLE = re.compile(r"[!-~]+")  # ASCII without the space


@dataclass(frozen=True, slots=True)
class Target:
    """Where the requests go. `path` is the prefix of the API, ending in /v1."""

    scheme: str
    host: str
    port: int
    path: str
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, base_url: str, api_key: str | None) -> "Target":
        """From a URL with or without /v1. Raises BenchError."""
        try:
            parts = urlsplit(base_url)
            port, host = parts.port, (parts.hostname or "").encode("idna").decode("ascii")
        except ValueError as error:
            raise BenchError(f"--base-url: {base_url!r} is no URL: {error}") from error
        if parts.scheme not in _DEFAULT_PORTS or not host:
            raise BenchError(f"--base-url: {base_url!r} must be http://HOST:PORT or https://HOST:PORT")
        if port == 0:
            raise BenchError(f"--base-url: {base_url!r} has port 0, where no server can listen")
        path = parts.path.rstrip("/")
        path = path if path.endswith("/v1") else f"{path}/v1"
        if not _VISIBLE.fullmatch(path):
            raise BenchError(f"--base-url: {base_url!r} holds spaces or characters beyond ASCII: write them as %XX")
        if api_key is not None and not _VISIBLE.fullmatch(api_key):
            raise BenchError("--api-key holds spaces or characters beyond ASCII, which cannot be sent in a header")
        return cls(parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme], path, api_key)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request to a path below the host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{self.port}", "Accept: text/event-stream, */*"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("ascii") + body


class Connection(asyncio.Protocol):
    """Sends one request at a time."""

    def __init__(self) -> None:
        self._reader = ResponseReader()
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._on_body: OnBody | None = None
        self._error_body = b""

    @classmethod
    async def open(cls, target: Target) -> "Connection":
        """Connect. Raises RequestFailed."""
        context = ssl.create_default_context() if target.scheme == "https" else None
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(cls, target.host, target.port, ssl=context)
        except OSError as error:
            raise RequestFailed("cannot connect", tls_failure(error) or str(error)) from error
        return connection

    async def exchange(self, request: bytes, on_body: OnBody) -> tuple[int, bytes]:
        """Send a request and wait for the end of its response; returns the status and, unless it is 200, the body.

        A body with status 200 goes to `on_body(bytes, arrival time)`, which may raise to end the exchange.

        Raises:
            RequestFailed: the connection broke, or the response is malformed.
        """
        if self._transport is None or self._transport.is_closing():
            raise RequestFailed("disconnected", "the connection is closed")
        self._reader.start_next()
        self._error_body = b""
        self._on_body = on_body
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.abort()
            raise
        finally:
            self._done = None
        return self._reader.status, self._error_body

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be sent here."""
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and self._reader.is_done
            and self._reader.keeps_open
        )

    @property
    def has_answer_begun(self) -> bool:
        """Whether a byte of the current response has arrived."""
        return self._reader.has_begun

    def abort(self) -> None:
        """Close at once; the server sees that its client has left."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        now_s = time.monotonic()
        if self._done is None or self._done.done():
            self.abort()  # nobody asked for these bytes
            return
        try:
            body = self._reader.feed(data)
            if body and self._on_body is not None:
                if self._reader.status == 200:
                    self._on_body(body, now_s)
                else:
                    self._error_body += body
        except RequestFailed as error:
            self._done.set_exception(error)
            return
        if self._reader.is_done:
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        if self._done is None or self._done.done():
            return
        try:
            self._reader.close()
        except RequestFailed:
            reason = "" if exc is None else f": {exc}"
            self._done.set_exception(RequestFailed("disconnected", f"the server closed the connection{reason}"))
        else:
            self._done.set_result(None)


class Pool:
    """Idle connections to one server, the last used first. An exchange may take `timeout_s`, connecting included."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []

    async def exchange(self, request: bytes, on_body: OnBody) -> tuple[int, bytes]:
        """As `Connection.exchange`, on an idle connection or a new one; a timeout is a RequestFailed too.

        A server may close an idle connection just when a request is on its way; that request is sent once more.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._try_connections(request, on_body)
        except TimeoutError:
            raise RequestFailed("timeout", f"no complete answer within {self._timeout_s:g} s") from None

    async def _try_connections(self, request: bytes, on_body: OnBody) -> tuple[int, bytes]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_reusable:
                continue
            try:
                return await self._exchange(connection, request, on_body)
            except RequestFailed as error:
                if error.kind != "disconnected" or connection.has_answer_begun:
                    raise
        return await self._exchange(await Connection.open(self._target), request, on_body)

    async def _exchange(self, connection: Connection, request: bytes, on_body: OnBody) -> tuple[int, bytes]:
        result = await connection.exchange(request, on_body)
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.abort()
        return result

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().abort()
