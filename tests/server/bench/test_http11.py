"""Responses cut anywhere are parsed alike; what is no response is refused."""

import pytest

from server.bench.errors import BadResponse
from server.bench.http11 import ResponseReader
from tests.tables import rows

CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b: c\r\n\r\n"
    b"5\r\nhello\r\n1;ext=1\r\n \r\n00a\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
)
LENGTH = b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\nConnection: close\r\n\r\nhello"


def read(data: bytes, sizes: list[int]) -> tuple[ResponseReader, bytes]:
    reader, body, at = ResponseReader(), b"", 0
    for size in sizes:
        body += reader.feed(data[at : at + size])
        at += size
    return reader, body + (reader.feed(data[at:]) if at < len(data) else b"")


def test_a_response_cut_anywhere():
    for sizes in [*([cut] for cut in range(1, len(CHUNKED))), [1] * len(CHUNKED)]:
        reader, body = read(CHUNKED, sizes)
        assert (reader.status, body) == (200, b"hello 0123456789"), sizes
        assert (reader.is_done, reader.keeps_open, reader.headers["x-a"]) == (True, True, "b: c"), sizes
    reader, body = read(LENGTH, [1] * len(LENGTH))
    assert (reader.status, body, reader.is_done, reader.keeps_open) == (404, b"hello", True, False)


def test_a_second_response_on_the_same_connection():
    reader = ResponseReader()
    for _ in range(2):
        assert not reader.has_begun
        assert reader.feed(CHUNKED) == b"hello 0123456789"
        assert reader.has_begun
        reader.start_next()


def test_a_body_that_ends_with_the_connection():
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.0 200 OK\r\n\r\nab") + reader.feed(b"c") == b"abc"
    assert not reader.is_done
    reader.close()
    assert reader.is_done
    assert not reader.keeps_open


def test_responses_without_a_body():
    for head in (b"204 No Content\r\n", b"200 OK\r\nContent-Length: 0\r\n"):
        reader = ResponseReader()
        assert reader.feed(b"HTTP/1.1 " + head + b"\r\n") == b""
        assert reader.is_done


@rows(
    "data, words",
    (b"SSH-2.0-x\r\n\r\n", "status line"),
    (b"HTTP/1.1 abc\r\n\r\n", "status line"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "Content-Length is '-1'"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "size of a chunk"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n", "size of a chunk"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", "longer than its size"),
    (CHUNKED + b"x", "after the end"),
    (LENGTH + b"x", "more bytes than its Content-Length"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5000, "without a size"),
    (b"x" * 70000, "head of more than"),
)
def test_what_is_no_response(data, words):
    with pytest.raises(BadResponse, match=words):
        ResponseReader().feed(data)


@rows("end", 0, 10, len(LENGTH) - 1)
def test_a_connection_that_closes_early(end):
    reader = ResponseReader()
    reader.feed(LENGTH[:end])
    with pytest.raises(BadResponse, match="before the end"):
        reader.close()
