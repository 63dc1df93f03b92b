"""Clients that send too much, too slowly or nothing: connections end, and the service goes on."""

import asyncio
import socket
import time
from contextlib import ExitStack, suppress
from http.client import HTTPResponse

import h11
import pytest
import uvloop

from server.protocol import MAX_HEAD_BYTES, GuardedConnection, WrittenTogether
from tests.server.conftest import FakeEngine, read_to_end, serve
from tests.tables import rows

TIMEOUT_S = 0.3
HEAD = b"GET /health/live HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def impatient(tokenizer):
    with serve(FakeEngine(), tokenizer, receive_timeout=TIMEOUT_S) as service:
        yield service


@pytest.fixture
def connection(impatient):
    host, port = impatient.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        yield connection
    with impatient.http() as http:
        assert http.get("/health/live").status_code == 200


def test_an_endless_head_is_cut_off(connection):
    """Without a limit it filled the memory, and its copying stopped the event loop for seconds."""
    connection.sendall(HEAD + b"X-A: ")
    with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012
        for _ in range(1000):
            connection.sendall(b"a" * 65536)
        connection.recv(1)


def test_a_head_up_to_the_limit_is_fine(connection):
    connection.sendall(HEAD + b"X-A: " + b"a" * (MAX_HEAD_BYTES - 200) + b"\r\nConnection: close\r\n\r\n")
    assert read_to_end(connection).startswith(b"HTTP/1.1 200")


@rows("sent", b"", HEAD)
def test_a_head_that_does_not_come_ends_the_connection(connection, sent):
    connection.sendall(sent)
    assert read_to_end(connection) == b""


def test_a_dripping_head_ends_the_connection(connection):
    connection.sendall(HEAD)
    with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012
        for _ in range(200):
            connection.sendall(b"X: y\r\n")
            time.sleep(TIMEOUT_S / 10)


def test_a_head_in_parts_does_not_end_a_long_answer(impatient, connection):
    """A deadline restarted by every part would expire during the answer."""
    impatient.engine.script, impatient.engine.delay_s = (lambda _request: [[5]] * 12), TIMEOUT_S / 5
    body = b'{"prompt": "a", "max_tokens": 12}'
    for part in (b"POST /v1/completions HTTP/1.1\r\n", b"Host: x\r\n", b"Content-Length: %d\r\n\r\n" % len(body), body):
        connection.sendall(part)
        time.sleep(0.02)
    answer = HTTPResponse(connection)
    answer.begin()
    assert answer.status == 200
    assert b'"completion_tokens":12' in answer.read()


def test_a_body_that_does_not_come_is_told_so(connection):
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in answer


def test_a_connection_may_be_idle_between_requests(connection):
    for _ in range(2):
        connection.sendall(HEAD + b"\r\n")
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200
        answer.read()  # head and body may come apart
        time.sleep(2 * TIMEOUT_S)


def test_a_body_that_drips_after_its_answer_ends_the_connection(connection):
    """The answer (413) needs no more of the body, so the client gets as long for the rest as for a head."""
    connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
    assert connection.recv(65536).startswith(b"HTTP/1.1 413")
    with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012
        for _ in range(200):
            connection.sendall(b" ")
            time.sleep(TIMEOUT_S / 10)


def test_400_connections_with_dripping_heads_end_and_others_are_served(impatient):
    host, port = impatient.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection((host, int(port)), timeout=10)) for _ in range(400)]
        for connection in connections:
            with suppress(ConnectionError):  # on a slow machine the first ones may be over by now
                connection.sendall(HEAD)
        with impatient.http() as http:
            assert http.get("/health/live").status_code == 200
        for connection in connections:
            with suppress(ConnectionResetError):  # closed with a head that nobody had read yet
                assert read_to_end(connection) == b""


@rows("method", b"GET", b"HEAD")
@rows("headers", [], [(b"content-length", b"30")])
def test_a_body_is_written_as_h11_writes_it(method, headers):
    """Chunks take a short cut past h11's state machine."""
    outputs = []
    for kind in (h11.Connection, GuardedConnection):
        connection = kind(h11.SERVER)
        output = b""
        for _ in range(2):
            connection.receive_data(method + b" / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert type(connection.next_event()) is h11.Request
            assert type(connection.next_event()) is h11.EndOfMessage
            output += connection.send(h11.Response(status_code=200, headers=headers))
            for size in (17, 0, 13):
                output += connection.send(h11.Data(data=b"" if method == b"HEAD" else b"x" * size))
            output += connection.send(h11.EndOfMessage())
            connection.start_next_cycle()
        outputs.append(output)
    assert outputs[0] == outputs[1]


def test_a_connection_that_has_closed_keeps_no_data_from_the_others():
    """uvloop raises if a closed connection is written to."""

    async def talk():
        loop = asyncio.get_running_loop()
        pairs = [socket.socketpair() for _ in range(2)]
        transports = [(await loop.connect_accepted_socket(asyncio.Protocol, ours))[0] for ours, _ in pairs]
        together = WrittenTogether()
        transports[0].abort()  # it is closed before the data is written
        together.waiting += [(transport, b"token") for transport in transports]
        together.write_soon()
        pairs[1][1].setblocking(False)
        received = await asyncio.wait_for(loop.sock_recv(pairs[1][1], 5), 5)
        transports[1].close()
        for _, theirs in pairs:
            theirs.close()
        return received

    assert uvloop.run(talk()) == b"token"
