"""`ResponseReader`: parses the HTTP/1.1 responses that arrive on one connection, one after the other. Does no I/O.

Plain parsing instead of h11, because the client process must cost little per token: a load generator that is slower
than the server measures itself.
"""

import enum

from server.bench.errors import BadResponse

_MAX_HEAD_BYTES = 64 * 1024
_MAX_LINE_BYTES = 4096  # of a chunk's size or of a trailer
_NO_CONTENT, _NOT_MODIFIED = 204, 304


class _State(enum.Enum):
    HEAD = enum.auto()
    LENGTH = enum.auto()  # `_left` more bytes
    UNTIL_CLOSE = enum.auto()
    CHUNK_SIZE = enum.auto()
    CHUNK_DATA = enum.auto()  # `_left` more bytes of this chunk
    CHUNK_END = enum.auto()  # the line break after a chunk
    TRAILERS = enum.auto()
    DONE = enum.auto()


class ResponseReader:
    """One response at a time: `feed` bytes until `is_done`, then `start_next`."""

    def __init__(self) -> None:
        self.start_next()

    def start_next(self) -> None:
        """Forget the last response; the next byte belongs to a new one."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self._state = _State.HEAD
        self._rest = b""
        self._left = 0

    @property
    def is_done(self) -> bool:
        """The whole response has arrived."""
        return self._state is _State.DONE

    @property
    def has_begun(self) -> bool:
        """At least one byte of the response has arrived."""
        return self._state is not _State.HEAD or bool(self._rest)

    @property
    def keeps_open(self) -> bool:
        """The server will take another request on this connection."""
        return self.headers.get("connection", "").lower() != "close" and not self._is_old

    @property
    def _is_old(self) -> bool:
        return self.headers.get(":version") == "HTTP/1.0"

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body that `data` holds. Raises BadResponse."""
        if self._state is _State.HEAD:
            data = self._read_heads(data)
        if self._state is _State.HEAD or not data:
            return b""
        if self._state is _State.UNTIL_CLOSE:
            return data
        if self._state is _State.LENGTH:
            return self._take_length(data)
        if self._state is _State.DONE:
            raise BadResponse("the server sent bytes after the end of its response")
        return self._take_chunks(data)

    def close(self) -> None:
        """The server has closed the connection. Raises BadResponse if the response is not complete."""
        if self._state is _State.UNTIL_CLOSE:
            self._state = _State.DONE
        if self._state is not _State.DONE:
            raise BadResponse("the connection closed before the end of the response")

    def _read_heads(self, data: bytes) -> bytes:
        """Parse the head, after skipping interim responses (1xx); returns what follows it."""
        data = self._rest + data
        while True:
            head, end, rest = data.partition(b"\r\n\r\n")
            if not end:
                if len(data) > _MAX_HEAD_BYTES:
                    raise BadResponse(f"a response head of more than {_MAX_HEAD_BYTES} bytes")
                self._rest = data
                return b""
            self.status, self.headers = _parse_head(head)
            if self.status >= 200:
                break
            data = rest
        self._rest = b""
        self._state = self._body_state()
        return rest

    def _body_state(self) -> _State:
        if self.status in (_NO_CONTENT, _NOT_MODIFIED):
            return _State.DONE
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return _State.CHUNK_SIZE
        length = self.headers.get("content-length")
        if length is None:
            return _State.UNTIL_CLOSE
        if not length.isdecimal():
            raise BadResponse(f"Content-Length is {length!r}")
        self._left = int(length)
        return _State.LENGTH if self._left else _State.DONE

    def _take_length(self, data: bytes) -> bytes:
        if len(data) > self._left:
            raise BadResponse("the server sent more bytes than its Content-Length says")
        self._left -= len(data)
        if not self._left:
            self._state = _State.DONE
        return data

    def _take_chunks(self, data: bytes) -> bytes:
        data, self._rest = self._rest + data, b""
        pieces, at = [], 0
        while at < len(data) and self._state is not _State.DONE:
            if self._state is _State.CHUNK_DATA:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._state = _State.CHUNK_END
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._rest = data[at:]
                if len(self._rest) > _MAX_LINE_BYTES:
                    raise BadResponse("a chunk without a size")
                return b"".join(pieces)
            self._end_line(data[at:end].rstrip(b"\r"))
            at = end + 1
        if at < len(data):
            raise BadResponse("the server sent bytes after the end of its response")
        return b"".join(pieces)

    def _end_line(self, line: bytes) -> None:
        """One complete line that is not data."""
        if self._state is _State.CHUNK_END:
            if line:
                raise BadResponse("a chunk is longer than its size says")
            self._state = _State.CHUNK_SIZE
        elif self._state is _State.TRAILERS:
            if not line:
                self._state = _State.DONE
        else:
            try:
                self._left = int(line.partition(b";")[0], 16)
            except ValueError:
                raise BadResponse(f"{line[:40]!r} is no size of a chunk") from None
            if self._left < 0:
                raise BadResponse(f"{line[:40]!r} is no size of a chunk")
            self._state = _State.CHUNK_DATA if self._left else _State.TRAILERS


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not status.isdecimal():
        raise BadResponse(f"{first[:60]!r} is no status line of HTTP/1.1")
    headers = {":version": version}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(status), headers
