"""How the service ends: signals while requests run, an engine that dies or hangs, and what its clients are told."""

import json
import os
import re
import signal
import socket
import threading
import time
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path

import pytest

from tests.server.conftest import wait_until
from tests.server.service_process import start

LONG = {"prompt": [5], "max_tokens": 400, "temperature": 0, "ignore_eos": True}


class Clients:
    """Each asks in a thread of its own, half of them for a stream."""

    def __init__(self, service, count, fields=LONG, num_running=None):
        self._service = service
        self.answers = [None] * count
        self._threads = [threading.Thread(target=self._ask, args=(i, fields)) for i in range(count)]
        for thread in self._threads:
            thread.start()
        with service.http() as http:
            enough = count if num_running is None else num_running
            wait_until(lambda: self._num_running(http) >= enough)

    @staticmethod
    def _num_running(http):
        stats = http.get("/health").json()["stats"]
        return 0 if stats is None else stats["num_running"]  # none until the engine has published some

    def _ask(self, index, fields):
        with self._service.http() as http:
            self.answers[index] = http.post("/v1/completions", json={**fields, "stream": index % 2 == 0})

    def join(self):
        for thread in self._threads:
            thread.join(30)
        assert all(answer is not None for answer in self.answers)

    def codes(self):
        """Status of whole answers and the error code, or 200 and the code in the last event of a stream."""
        codes = set()
        for index, answer in enumerate(self.answers):
            body = answer.text.strip().split("\n\n")[-1].removeprefix("data: ") if index % 2 == 0 else answer.text
            codes.add(json.loads(body)["error"]["code"] if body != "[DONE]" else "done")
        return codes


def test_16_requests_are_finished_after_sigterm(tmp_path):
    with start(tmp_path) as service:
        clients = Clients(service, 16, {**LONG, "max_tokens": 240})
        service.signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
        clients.join()
    assert {answer.status_code for answer in clients.answers} == {200}
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in clients.answers[::2])
    assert {answer.json()["usage"]["completion_tokens"] for answer in clients.answers[1::2]} == {240}


def test_a_terminal_that_closes_drains_however_often_it_says_so(tmp_path):
    with start(tmp_path) as service:
        clients = Clients(service, 4, {**LONG, "max_tokens": 240})
        service.signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP: draining" in service.err)
        for _ in range(3):
            service.signal(signal.SIGHUP)
        assert service.process.wait(30) == 0
        clients.join()
    assert {answer.status_code for answer in clients.answers} == {200}
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in clients.answers[::2])
    assert {answer.json()["usage"]["completion_tokens"] for answer in clients.answers[1::2]} == {240}


def test_nohup_outlives_its_terminal(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does: a child inherits it
    try:
        with start(tmp_path) as service:
            service.signal(signal.SIGHUP)
            with service.http() as http:
                assert http.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200
            status = Path(f"/proc/{service.process.pid}/status").read_text()
            ignored = int(re.search(r"^SigIgn:\s*(\w+)", status, re.MULTILINE)[1], 16)
            assert ignored & 1 << (signal.SIGHUP - 1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_sigterm_ends_requests_with_a_503_g86(tmp_path):
    """Requests that were not streamed used to get a plain 500."""
    with start(tmp_path) as service:
        clients = Clients(service, 4)
        service.signal(signal.SIGTERM)
        wait_until(lambda: "SIGTERM: draining" in service.err)
        service.signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
        clients.join()
    assert {answer.status_code for answer in clients.answers[1::2]} == {503}
    assert clients.codes() == {"unavailable"}
    assert "Traceback" not in service.err


def test_a_request_that_is_still_being_sent_gets_a_503_g86(tmp_path):
    """The request is not admitted yet, so only the final cancellation reaches it."""
    with start(tmp_path) as service:
        host, port = service.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            Clients(service, 0)  # the service has read the line above
            service.signal(signal.SIGTERM)
            answer = HTTPResponse(connection)
            answer.begin()
            assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "unavailable")
        assert service.process.wait(30) == 0


@pytest.mark.processes
def test_a_hanging_engine_is_not_drained_g85(tmp_path):
    """Draining used to last its whole timeout, longer than Kubernetes waits before it kills. Three services at once."""
    with ExitStack() as stack:
        stopped, in_a_step, idle = (
            stack.enter_context(start(tmp_path / kind, kind)) for kind in ("slow", "hang", "fake")
        )
        asked = [
            Clients(stopped, 2),
            Clients(in_a_step, 2, {**LONG, "prompt": [66]}, num_running=1),  # the other may come too late for the step
        ]
        assert idle.url
        engine_pids = [service.engine_pid for service in (stopped, in_a_step, idle)]
        os.kill(stopped.engine_pid, signal.SIGSTOP)
        os.kill(idle.engine_pid, signal.SIGSTOP)
        start_s = time.monotonic()
        for service in (stopped, in_a_step, idle):
            service.signal(signal.SIGTERM)
        for service in (stopped, in_a_step, idle):
            assert service.process.wait(30) == 1, service.err
        assert time.monotonic() - start_s < 10
        for clients in asked:
            clients.join()
            assert clients.codes() == {"unavailable"}
        assert "the engine hangs" in stopped.err
        assert "the engine hangs" in in_a_step.err
        for pid in engine_pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_an_engine_that_dies_ends_the_service_if_so_set_g82(tmp_path):
    with start(tmp_path, "slow", "--exit-on-engine-death") as service:
        clients = Clients(service, 4)
        os.kill(service.engine_pid, signal.SIGKILL)
        assert service.process.wait(30) == 1
        clients.join()
    assert {answer.status_code for answer in clients.answers[1::2]} == {503}
    assert clients.codes() == {"unavailable"}
    assert "was killed by signal 9" in service.err


def test_an_idle_service_ends_with_its_engine_if_so_set_g82(tmp_path):
    with start(tmp_path, "slow", "--exit-on-engine-death") as service:
        assert service.url
        os.kill(service.engine_pid, signal.SIGKILL)
        assert service.process.wait(30) == 1


def test_an_engine_that_dies_leaves_a_service_that_says_so_g82(tmp_path):
    with start(tmp_path) as service, service.http() as http:
        clients = Clients(service, 2)
        os.kill(service.engine_pid, signal.SIGKILL)
        clients.join()
        assert clients.codes() == {"unavailable"}
        assert http.get("/health/live").status_code == http.get("/health").status_code == 503
        assert http.post("/v1/completions", json=LONG).status_code == 503
        service.signal(signal.SIGTERM)
        assert service.process.wait(30) == 1
