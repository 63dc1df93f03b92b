"""A Hugging Face hub on localhost: what the library asks of the real one, with faults that a test can order."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_right"


@dataclass
class Repository:
    """Files by revision. `listed_sizes` overrides what the listing says; `access` is open, gated or private."""

    revisions: dict[str, dict[str, bytes]]
    access: str = "open"
    listed_sizes: dict[str, int] = field(default_factory=dict)


@dataclass
class Hub:
    """What is on the hub, and what was asked of it: (method, path, Range header)."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    status: int | None = None  # answer everything with it
    faults: dict[str, list[Any]] = field(default_factory=dict)  # file to statuses, or bytes to send before hanging up
    stalls: bool = False  # weights stop after their first half, until the client hangs up
    stalled: threading.Event = field(default_factory=threading.Event)
    hung_up: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)

    def fetched(self) -> list[str]:
        """Files whose contents were asked for, sorted."""
        return sorted(
            path.rsplit("/", 1)[1] for method, path, _ in self.asked if "/resolve/" in path and method == "GET"
        )


def commit_of(revision: str) -> str:
    """The commit that a branch or a tag points to; a commit is itself."""
    is_commit = len(revision) == 40
    return revision if is_commit else hashlib.sha1(revision.encode()).hexdigest()


@contextmanager
def run_hub() -> Iterator[Hub]:
    """A hub that answers until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined]

    def log_message(self, *_args: object) -> None:
        """Nothing: the test asks `Hub.asked`."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        if self.hub.status is not None:
            return self._error(self.hub.status)
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if is_api else parts
        repository = self.hub.repositories.get(f"{owner}/{name}")
        is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.access == "private" and not is_known):
            return self._error(401, "RepoNotFound")
        revision = rest[1] if len(rest) > 1 else "main"
        files = {commit_of(r): files for r, files in repository.revisions.items()}.get(commit_of(revision))
        if files is None:
            return self._error(404, "RevisionNotFound")
        if not is_api:
            if repository.access == "gated" and not is_known:
                return self._error(401 if "Authorization" not in self.headers else 403, "GatedRepo")
            return self._file("/".join(rest[2:]), files, commit_of(revision))
        if rest[:1] == ["tree"]:
            sizes = {file: repository.listed_sizes.get(file, len(data)) for file, data in files.items()}
            return self._json([_entry(file, sizes[file], data) for file, data in files.items()])
        return self._json({"id": f"{owner}/{name}", "sha": commit_of(revision), "siblings": []})

    def _file(self, file: str, files: dict[str, bytes], commit: str) -> None:
        if file not in files:
            return self._error(404, "EntryNotFound")
        data, start = files[file], 0
        fault = None
        if self.command == "GET" and self.hub.faults.get(file):
            fault = self.hub.faults[file].pop(0)
        if isinstance(fault, int):
            return self._error(fault)
        wanted = self.headers.get("Range")
        if wanted is not None:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        self.send_response(200 if wanted is None else 206)
        if wanted is not None:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if isinstance(fault, bytes):  # a part of the file, then the connection breaks
            self.wfile.write(fault)
            self.close_connection = True
        elif self.hub.stalls and file.endswith(".safetensors"):
            self._stall(data[start:])
        else:
            self.wfile.write(data[start:])
        return None

    def _stall(self, data: bytes) -> None:
        self.wfile.write(data[: len(data) // 2])
        self.hub.stalled.set()
        self.close_connection = True
        self.connection.settimeout(30)
        try:
            is_gone = self.connection.recv(1) == b""
        except ConnectionResetError:
            is_gone = True
        if is_gone:
            self.hub.hung_up.set()

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status: int, code: str | None = None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _entry(file: str, size: int, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": file, "size": size, "oid": hashlib.sha1(data).hexdigest()}
    if file.endswith(".safetensors"):
        entry["lfs"] = {"oid": _etag(data), "size": size, "pointerSize": 130}
    return entry
