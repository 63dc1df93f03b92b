"""What `evals.client` sends again: only what a server has not begun to answer."""

import argparse
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from evals.client import Client, ServerError, add_server_arguments, make_client
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


def test_a_setting_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"patience_s is -1"):
        Client(base_url="http://a/v1", patience_s=-1)
