"""Clients that leave (B43, B44): every running request is aborted exactly once, and nothing is left behind."""

import json
import random
import socket
import threading

import httpx2
import pytest

from tests.server.conftest import FakeEngine, read_to_end, serve, wait_until
from tests.tables import rows

LONG = {"prompt": "a", "max_tokens": 2000}


@pytest.fixture
def slow(service):
    service.engine.script = lambda _request: [[5]] * 2000
    service.engine.delay_s = 0.005
    return service


def is_clean(service, num_requests):
    return len(service.engine.requests) == num_requests and not service.engine.running and service.num_inflight == 0


@rows("n", 1, 3)
def test_leaving_after_the_first_chunk(slow, n):
    slow.engine.forget()
    with slow.client() as client, client.completions.create(model="tiny", n=n, stream=True, **LONG) as stream:
        next(iter(stream))
    wait_until(lambda: is_clean(slow, n))
    assert sorted(slow.engine.aborted) == sorted(request.request_id for request in slow.engine.requests)


@rows("n", 1, 3)
@rows("stream", False, True)
def test_leaving_before_any_answer(slow, stream, n):
    slow.engine.forget()
    slow.engine.delay_s = 60 if stream else 0.005
    with slow.http() as http, pytest.raises(httpx2.ReadTimeout):
        http.post("/v1/completions", json={**LONG, "n": n, "stream": stream}, timeout=0.3)
    wait_until(lambda: is_clean(slow, n))
    assert sorted(slow.engine.aborted) == sorted(request.request_id for request in slow.engine.requests)


def test_finished_requests_are_not_aborted(slow):
    with slow.http() as http:
        for stream in (False, True):
            assert http.post("/v1/completions", json={**LONG, "max_tokens": 5, "stream": stream}).status_code == 200
    assert is_clean(slow, 2)
    assert slow.engine.aborted == []


def test_leaving_at_random_moments(slow):
    slow.engine.script = lambda _request: [[5]] * 20
    rng = random.Random(3)
    moments = [rng.uniform(0.01, 0.2) for _ in range(40)]

    def visit(moment, stream):
        with slow.http() as http, pytest.raises((httpx2.ReadTimeout, StopIteration)):  # noqa: PT012
            http.post("/v1/completions", json={**LONG, "n": 2, "stream": stream}, timeout=moment)
            raise StopIteration  # it was finished before it could leave

    visitors = [threading.Thread(target=visit, args=(moment, i % 2 == 0)) for i, moment in enumerate(moments)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    wait_until(lambda: not slow.engine.running and slow.num_inflight == 0)
    assert len(set(slow.engine.aborted)) == len(slow.engine.aborted)
    with slow.http() as http:
        assert http.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200


def test_a_client_that_does_not_read_gets_everything_later_and_little_is_buffered_meanwhile(tokenizer):
    """Events of 5 kB, since the model's name is in each: far more than the sockets hold."""
    engine = FakeEngine(script=lambda _request: [5] * 3000)
    fields = {"prompt": [300], "max_tokens": 3000, "stream": True}
    body = json.dumps(fields).encode()
    with serve(engine, tokenizer, served_model_name=("m" * 5000,)) as service, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = service.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        wait_until(lambda: engine.requests and not engine.running)
        [protocol] = [each for server in service.servers for each in server.server_state.connections]
        wait_until(lambda: protocol.flow.write_paused)
        assert protocol.transport.get_write_buffer_size() < 1e6
        data = read_to_end(connection)
    assert data.count(b'"text":"') == 3001  # the last one has the finish reason
    assert data.count(b'"text":""') == 1
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
