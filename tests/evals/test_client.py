"""What `evals.client` sends again: only what a server has not begun to answer."""

import argparse
import json
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from evals.client import Client, ServerError, add_server_arguments, json_object, make_client
from evals.distributions import score
from evals.texts import Sequence, from_questions, tokens_of
from tests.tables import rows


@contextmanager
def scripted(*statuses: int, retry_after: str | None = None) -> Iterator[tuple[str, list[int]]]:
    """A server that answers with one status after another, 0 for a connection that breaks: (base URL, those sent)."""
    sent: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Keeps the test output clean."""

        def do_POST(self) -> None:
            status = statuses[min(len(sent), len(statuses) - 1)]
            sent.append(status)
            if status == 0:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            data = json.dumps({"status": status}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if retry_after is not None:
                self.send_header("Retry-After", retry_after)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@rows(
    "statuses, wanted",
    ([429, 200], [429, 200]),
    ([503, 200], [503, 200]),
    ([400, 200], [400]),
    ([404, 200], [404]),
    ([500, 200], [500]),
    ([0, 200], [0]),  # the server may have begun
)
def test_only_a_busy_server_is_asked_again(statuses: list[int], wanted: list[int]) -> None:
    with scripted(*statuses) as (url, sent):
        client = Client(base_url=url, model="m", patience_s=5)
        if wanted[-1] == 200:
            assert client.get("/completions", {}) == {"status": 200}
        else:
            with pytest.raises(ServerError, match=f"status {wanted[0]}" if wanted[0] else "cannot be reached"):
                client.get("/completions", {})
        assert sent == wanted


@rows("patience_s, retry_after", (0.0, None), (0.3, "60"), (0.3, None))
def test_patience_ends(patience_s: float, retry_after: str | None) -> None:
    with scripted(503, retry_after=retry_after) as (url, sent):
        with pytest.raises(ServerError, match="status 503"):
            Client(base_url=url, patience_s=patience_s).get("/completions", {})
        assert len(sent) <= 2
        assert len(sent) == 1 or (patience_s and retry_after is None)


def test_a_server_that_refuses_connections_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    started: list[ThreadingHTTPServer] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Keeps the test output clean."""

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "late"}]}')

    def start() -> None:
        started.append(ThreadingHTTPServer(("127.0.0.1", port), Handler))
        started[0].serve_forever(poll_interval=0.01)

    timer = threading.Timer(0.3, start)
    timer.start()
    assert Client(base_url=f"http://127.0.0.1:{port}/v1", patience_s=20).first_model() == "late"
    started[0].shutdown()
    timer.join()
    started[0].server_close()


@rows("given, flag", ("{}", None), ("{}/v1", None), ("{}/v1/", None), ("{}/", None), (None, "{}"), (None, "{}/v1"))
def test_a_url_may_lack_v1(given: str | None, flag: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    root = "http://127.0.0.1:9"
    monkeypatch.setattr(Client, "first_model", lambda client: client.base_url)
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    args = parser.parse_args([] if flag is None else ["--base-url", flag.format(root)])
    assert make_client(args, given and given.format(root)).model == f"{root}/v1"


@rows(
    "settings, words",
    ({"base_url": "http://a..b/v1"}, "it names no host"),
    ({"patience_s": -1}, "patience_s is -1"),
    ({"patience_s": math.nan}, "patience_s is nan"),
    ({"timeout_s": 0}, "timeout_s is 0"),
    ({"timeout_s": math.inf}, "timeout_s is inf"),
    ({"api_key": "schlüssel"}, "api_key holds"),
)
def test_a_setting_out_of_range_is_named(settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Client(**{"base_url": "http://a/v1", **settings})


@rows("text", "[1]", "1", "{", "")
def test_a_flag_that_must_be_an_object(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="JSON"):
        json_object(text)
    assert json_object('{"a": 1}') == {"a": 1}


@contextmanager
def answering(status: int, body: object, num_missing: int = 0) -> Iterator[Client]:
    """A server with one answer to all, whose last `num_missing` bytes never come."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Keeps the test output clean."""

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(data) + num_missing))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Client(base_url=f"http://127.0.0.1:{server.server_address[1]}/v1", model="m")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


WHOLE = {"choices": [{"message": {"content": "Paris"}}]}


@rows(
    "status, body, num_missing, words",
    (200, WHOLE, 50, "cannot be read: IncompleteRead"),
    (500, WHOLE, 50, "status 500: the answer broke off"),
    (200, b"<html>", 0, "does not answer in JSON"),
    (200, b"\xff", 0, "does not answer in JSON"),
    (200, [1], 0, "does not answer as the API says"),
    (200, {"choices": []}, 0, "does not answer as the API says"),
    (200, {"choices": [{"message": None}]}, 0, "does not answer as the API says"),
    (200, {"choices": [{"message": {}}], "usage": {"completion_tokens": "many"}}, 0, "does not answer as the API says"),
)
def test_a_malformed_answer_is_an_error_of_the_server(status: int, body: object, num_missing: int, words: str) -> None:
    with answering(status, body, num_missing) as client, pytest.raises(ServerError, match=words):
        client.ask([])


def test_an_answer_may_lack_its_usage() -> None:
    for usage in ({}, {"usage": None}, {"usage": {}}):
        with answering(200, WHOLE | usage) as client:
            assert (client.ask([]).content, client.ask([]).tokens) == ("Paris", 0)


def test_a_server_without_models_is_named() -> None:
    with answering(200, {"data": []}) as client, pytest.raises(ServerError, match="/models does not answer as"):
        replace(client, model="").first_model()


def test_every_tool_names_a_malformed_answer() -> None:
    with answering(200, {"choices": [{"prompt_logprobs": [None, {}]}]}) as client:
        for ask in (
            lambda: score(client, [Sequence(ids=[1, 2])], 1),
            lambda: tokens_of(client, "a"),
            lambda: from_questions(client, 5, 1),
        ):
            with pytest.raises(ServerError, match=r"does not answer as the API says|does not know"):
                ask()
    with (
        answering(200, {"choices": [{"logprobs": {"a": 1}}]}) as client,
        pytest.raises(ServerError, match="the API says"),
    ):
        score(client, [Sequence(ids=[1, 2])], 1)
    with (
        answering(200, {"choices": [{"prompt_logprobs": [None]}]}) as client,
        pytest.raises(ServerError, match="no token"),
    ):
        score(client, [Sequence(ids=[1])], 1)
