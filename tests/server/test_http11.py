"""HTTP/1.1 over raw sockets, as clients and attackers write it: upgrades, chunks, pipelines, faulty framing."""

import json
import socket
import time
from contextlib import contextmanager
from http.client import HTTPResponse

import pytest

from server.protocol import MAX_HEAD_BYTES
from tests.server.conftest import read_to_end, wait_until
from tests.tables import rows

BODY = b'{"prompt": "Hello"}'
SMUGGLED = b'{"prompt": "GET /version HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"}'
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"


@pytest.fixture
def connect(service):
    """Opens a connection; at its end the service must still answer on another one."""
    host, port = service.url.removeprefix("http://").split(":")

    @contextmanager
    def opened():
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield connection
        with service.http() as http:
            assert http.get("/health/live").status_code == 200

    return opened


@pytest.fixture
def connection(connect):
    with connect() as connection:
        yield connection


def post(*headers, body=BODY, path=b"/tokenize", version=b"1.1"):
    """Head and body of a request; `headers` come on top of Host and the body's length."""
    length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
    return b"POST %s HTTP/%s\r\nHost: x\r\n" % (path, version) + length + b"".join(headers) + b"\r\n", body or b""


def chunked(*parts):
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def answer_of(connection, method="POST"):
    """Status and JSON of the next response."""
    response = HTTPResponse(connection, method=method)
    response.begin()
    return response.status, json.loads(response.read())


def answers_of(connection, count):
    """Status and JSON of several responses, which may arrive in one read."""
    answers = []
    with connection.makefile("rb") as file:
        for _ in range(count):
            head = b"".join(iter(file.readline, b"\r\n"))
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            answers.append((int(head.split()[1]), json.loads(file.read(length))))
    return answers


def send(connection, *packets):
    """Each part is likely to be a read of its own at the server."""
    for packet in packets:
        connection.sendall(packet)
        time.sleep(0.02)


UPGRADES = {
    "h2c": H2C,
    "foo": b"Connection: Upgrade\r\nUpgrade: foo\r\n",
    "websocket": b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    "unannounced": b"Upgrade: h2c\r\n",
}


@rows("num_packets", 1, 2)
@rows("upgrade", *UPGRADES.values())
def test_an_upgrade_is_ignored_and_the_body_read_g01(connect, num_packets, upgrade):
    with connect() as connection:
        head, body = post(upgrade)
        send(connection, *([head + body] if num_packets == 1 else [head, body]))
        assert answer_of(connection)[1]["count"] > 0
        connection.sendall(b"".join(post()))  # the connection goes on in HTTP/1.1
        assert answer_of(connection)[0] == 200


@rows("is_chunked", False, True)
@rows("upgrade", b"", H2C, UPGRADES["foo"])
def test_a_body_is_never_read_as_a_request_g01(connect, is_chunked, upgrade):
    """A request used to get two answers: its own, and that of the request inside its body."""
    with connect() as connection:
        if is_chunked:
            head, _ = post(upgrade, b"Transfer-Encoding: chunked\r\n", body=None)
            body = chunked(SMUGGLED[:11], SMUGGLED[11:])
        else:
            head, body = post(upgrade, body=SMUGGLED)
        send(connection, head, body)
        status, answer = answer_of(connection)
        assert (status, answer["count"] > 10) == (200, True)
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert read_to_end(connection).count(b"HTTP/1.1 ") == 1


def test_a_websocket_handshake_is_a_plain_get_g01(connection):
    connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + UPGRADES["websocket"] + b"\r\n")
    assert answer_of(connection)[0] == 200


def test_a_stream_after_an_upgrade_header_notices_that_the_client_leaves_g01(service, connection):
    """h11 pauses reading where a protocol might be switched; a paused connection would not see its end."""
    service.engine.script, service.engine.delay_s = (lambda _request: [[5]] * 2000), 0.005
    for stream in (b"true", b"false"):
        body = b'{"prompt": "a", "max_tokens": 2000, "stream": %s}' % stream
        with socket.create_connection(connection.getpeername(), timeout=10) as leaver:
            leaver.sendall(b"".join(post(H2C, body=body, path=b"/v1/completions")))
            wait_until(lambda: len(service.engine.running) == 1)
        wait_until(lambda: not service.engine.running)
    assert len(service.engine.aborted) == 2


def test_expect_100_continue(connection):
    head, body = post(b"Expect: 100-continue\r\n")
    connection.sendall(head)
    assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(body)
    assert answer_of(connection)[0] == 200
    connection.sendall(
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\nExpect: 100-continue\r\n\r\n"
    )
    status, answer = answer_of(connection)
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


def test_pipelined_requests_are_answered_in_order(connection):
    bodies = [b'{"prompt": "%s"}' % (b"word " * count) for count in (1, 2, 3)]
    connection.sendall(b"".join(b"".join(post(body=body)) for body in bodies))
    counts = [answer["count"] for _, answer in answers_of(connection, len(bodies))]
    assert counts == sorted(set(counts))


def test_chunks_with_extensions_and_trailers(connection):
    head, _ = post(b"Transfer-Encoding: chunked\r\n", body=None)
    connection.sendall(
        head + b"5;a=b\r\n" + BODY[:5] + b"\r\n%X\r\n" % len(BODY[5:]) + BODY[5:] + b"\r\n0\r\nX: y\r\n\r\n"
    )
    assert answer_of(connection)[0] == 200


def chat_stream(version):
    body = b'{"prompt": "a", "max_tokens": 3, "stream": true}'
    return b"".join(post(body=body, path=b"/v1/completions", version=version))


def test_a_stream_in_http_1_0_is_bare_events_and_a_close_g02(service, connection):
    service.engine.script = lambda _request: [[5]] * 3
    connection.sendall(chat_stream(b"1.0"))
    head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"content-length" not in head.lower()
    assert b"connection: close" in head.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(b"\n\ndata: [DONE]\n\n")


def test_a_whole_answer_in_http_1_0_has_its_length_g02(connection):
    connection.sendall(b"".join(post(version=b"1.0")))
    head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head.lower() + b"\r\n"
    assert json.loads(body)["count"] > 0


def test_a_stream_in_http_1_1_is_chunked_and_keeps_the_connection_g02(service, connection):
    service.engine.script = lambda _request: [[5]] * 3
    connection.sendall(chat_stream(b"1.1"))
    response = HTTPResponse(connection)
    response.begin()
    assert response.chunked
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.sendall(b"".join(post()))
    assert answer_of(connection)[0] == 200


@rows(
    "target, status",
    *(
        [
            (b"http://x:1/v1/models?a=b", 200),
            (b"HTTPS://x/v1/models", 200),
            (b"http://[bad/v1/models", 200),
        ]
        + [(target, 404) for target in (b"*", b"ftp://x/v1/models", b"x:80")]
    ),
)
def test_a_target_in_absolute_form_means_its_path(connect, target, status):
    with connect() as connection:
        connection.sendall(b"GET %s HTTP/1.1\r\nHost: x:1\r\n\r\n" % target)
        assert answer_of(connection)[0] == status


@rows("target", b"http://x", b"http://x?a=/v1/models")
def test_a_target_without_a_path_means_the_page(connect, target):
    with connect() as connection:
        connection.sendall(b"GET %s HTTP/1.1\r\nHost: x:1\r\n\r\n" % target)
        response = HTTPResponse(connection)
        response.begin()
        assert (response.status, response.headers["content-type"]) == (200, "text/html; charset=utf-8")


TE = b"Transfer-Encoding: chunked\r\n"
FAULTS = {
    "no request": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),  # TLS on a plain port
    "no host": (b"GET /version HTTP/1.1\r\n\r\n", 400),
    "two lengths": (post(b"Content-Length: 5\r\n")[0], 400),
    "a length that is no number": (post(b"Content-Length: +5\r\n", body=None)[0], 400),
    "length and chunks": (b"".join(post(TE)), 400),
    "length and chunks with an upgrade": (b"".join(post(TE, H2C)), 400),
    "chunks in HTTP/1.0": (post(TE, body=None, version=b"1.0")[0] + chunked(BODY), 400),
    "a chunk size that is no number": (post(TE, body=None)[0] + b"zz\r\n", 400),
    "a negative chunk size": (post(TE, body=None)[0] + b"-1\r\n\r\n", 400),
    "a chunk longer than its size": (post(TE, body=None)[0] + b"2\r\nabcd\r\n0\r\n\r\n", 400),
    "a folded header name": (b"GET /version HTTP/1.1\r\nHost: x\r\nA B: c\r\n\r\n", 400),
    "space before the colon": (post(b"Transfer-Encoding : chunked\r\n")[0], 400),
    "another coding": (post(b"Transfer-Encoding: gzip, chunked\r\n", body=None)[0], 501),
    "HTTP/2 at once": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "a large head at once": (b"GET /version HTTP/1.1\r\nHost: x\r\nA: %s\r\n\r\n" % (b"a" * MAX_HEAD_BYTES), 431),
    "a large head that goes on": (b"GET /version HTTP/1.1\r\nHost: x\r\nA: %s" % (b"a" * MAX_HEAD_BYTES), 431),
    "many small headers": (b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 12_000 + b"\r\n", 431),
}


def test_faulty_framing_gets_the_openai_error_body_and_a_close_g86(subtests, connect):
    """Error bodies used to be plain text, and bytes of a head's first read were not counted."""
    for fault, (sent, status) in FAULTS.items():
        with subtests.test(fault=fault), connect() as connection:
            connection.sendall(sent)
            head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status), head
            assert b"content-type: application/json" in head
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert "bytearray" not in error["message"]


def test_a_second_request_that_is_faulty_ends_the_connection_after_the_first_answer_g86(connection):
    connection.sendall(b"".join(post()) + b"nonsense\r\n\r\n")
    answers = read_to_end(connection)
    assert answers.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 400" in answers


@rows("upgrade", b"", H2C)
def test_the_rest_of_a_body_that_was_answered_early_is_dropped(connection, upgrade):
    body = b" " * 5_000_000
    connection.sendall(b"".join(post(upgrade, body=body)) + b"".join(post()))
    assert [status for status, _ in answers_of(connection, 2)] == [413, 200]


def test_a_chunk_that_breaks_after_the_answer_ends_the_connection(connection):
    """The answer (413) has been sent, so no second one can be."""
    connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\n" + TE + b"\r\n500000\r\n" + b" " * 5_000_000)
    status, _ = answer_of(connection)
    assert status == 413
    connection.sendall(b"a" * (0x500000 - 5_000_000) + b"\r\nzz\r\n")
    assert connection.recv(1) == b""
