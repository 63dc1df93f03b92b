"""Asks an OpenAI-compatible server many questions at once. Needs the standard library only."""

from __future__ import annotations

import argparse
import json
import random
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPMessage, RemoteDisconnected
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
R = TypeVar("R")
_BUSY = (429, 503)
_MAX_TIMEOUT_S = 1_000_000.0


class ServerError(RuntimeError):
    """The server refused a request, could not be reached, or answered nonsense; the message says which and why."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The final content, the calls as (name, arguments as JSON text), and the tokens by the server's count.

    `tokens` is 0 where the server counts none.
    """

    content: str
    calls: list[tuple[str, str]]
    tokens: int = 0
    reasoning: str = ""
    finish_reason: str = ""

    @property
    def text(self) -> str:
        """All that the user would see, in one string: the content, then a line per call."""
        return "\n".join([self.content, *(f"{name} {arguments}" for name, arguments in self.calls)])


@dataclass(frozen=True, kw_only=True)
class Client:
    """Where and how to ask. base_url ends in /v1.

    `patience_s`: for how long a request is sent again while the server answers 429 or 503, or refuses connections. Then
    it has done nothing yet. Nothing else is sent again: a 400 stays one, and an answer that broke off may have been
    computed already.
    """

    base_url: str
    model: str = ""
    api_key: str = ""
    timeout_s: float = 120.0
    patience_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {self.base_url!r}: must start with http:// or https://")
        try:
            (urlsplit(self.base_url).hostname or "").encode("idna")
        except ValueError as error:
            raise ValueError(f"base_url is {self.base_url!r}: it names no host: {error}") from error
        if not self.patience_s >= 0:  # a NaN is not
            raise ValueError(f"patience_s is {self.patience_s}: must not be negative")
        if not 0 < self.timeout_s <= _MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s is {self.timeout_s}: must be above 0 and at most {_MAX_TIMEOUT_S:,.0f}")
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("api_key holds characters beyond ASCII, which cannot be sent in a header")

    def get(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer to a GET, or to a POST if there is a body. A path that begins with "//" is not below /v1.

        Raises:
            ServerError: the server refused, broke off, did not answer in JSON, or could not be reached for
                `patience_s`.
        """
        base = self.base_url.rstrip("/")
        if path.startswith("//"):
            base, path = base.removesuffix("/v1"), path[1:]
        request = urllib.request.Request(
            base + path,
            data=json.dumps(body).encode() if body is not None else None,
            headers={"Content-Type": "application/json"}
            | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}),
        )
        started_s, pause_s = time.monotonic(), 0.25
        while True:
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                failure = ServerError(f"{path}: status {error.code}: {_body_of(error)}")
                wait_s = max(pause_s, _retry_after_s(error.headers)) if error.code in _BUSY else None
            except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
                reason = error.reason if isinstance(error, urllib.error.URLError) else error
                failure = ServerError(f"{base}{path} cannot be reached: {error}. {_advice(reason, base)}")
                wait_s = pause_s if isinstance(reason, ConnectionRefusedError) else None
            except HTTPException as error:
                raise ServerError(f"{base}{path} cannot be read: {error!r}. Did the server end?") from error
            except ValueError as error:
                raise ServerError(f"{base}{path} does not answer in JSON: {error}") from error
            if wait_s is None or time.monotonic() + wait_s - started_s > self.patience_s:
                raise failure
            time.sleep(wait_s * random.uniform(0.75, 1.25))  # else all requests come back at once
            pause_s = min(2 * pause_s, 8.0)

    def first_model(self) -> str:
        """The model that is asked: the one named, or the first that the server lists."""
        if self.model:
            return self.model
        with reading(f"{self.base_url}/models"):
            return str(self.get("/models")["data"][0]["id"])

    def ask(self, messages: list[dict[str, Any]], **options: Any) -> Answer:
        """One chat completion."""
        reply = self.get("/chat/completions", {"model": self.model, "messages": messages} | options)
        with reading(f"{self.base_url}/chat/completions"):
            choice = reply["choices"][0]
            message = choice["message"]
            calls = [
                (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []
            ]
            return Answer(
                content=message.get("content") or "", calls=calls,
                tokens=int((reply.get("usage") or {}).get("completion_tokens") or 0),
                reasoning=message.get("reasoning") or message.get("reasoning_content") or "",
                finish_reason=choice.get("finish_reason") or "",
            )  # fmt: skip


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn the errors of code that takes an answer apart into ServerError: the answer at `what` is malformed."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ServerError(f"{what} does not answer as the API says: {error!r}") from error


def json_object(text: str) -> dict[str, Any]:
    """The value of a flag such as --fields. Raises ArgumentTypeError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object, such as {{}}")
    return found


def add_server_arguments(parser: argparse.ArgumentParser, *, one_server: bool = True) -> None:
    """The flags that say which server is asked, and how; without `one_server` the command names its servers itself."""
    if one_server:
        parser.add_argument(
            "--base-url", default="http://127.0.0.1:8000", help="with or without /v1 [http://127.0.0.1:8000]"
        )
    parser.add_argument("--model", default="", help="default: the first one that the server lists")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at once [8]")
    parser.add_argument(
        "--patience", type=float, default=60.0, metavar="SECONDS",
        help="for how long a request is repeated while the server is busy or refuses connections [60]",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="longest answer [3600]")


def make_client(args: argparse.Namespace, base_url: str | None = None) -> Client:
    """The client of those flags, for the server at `base_url` if that is given; both URLs with or without /v1.

    Asks the server for its model, unless --model names one, so a server that is not there is noticed at once.
    """
    if args.concurrency < 1:
        raise ValueError(f"--concurrency is {args.concurrency}: it must be at least 1")
    base_url = (base_url or args.base_url).rstrip("/").removesuffix("/v1") + "/v1"
    client = Client(base_url=base_url, model=args.model, api_key=args.api_key, timeout_s=args.timeout)
    return replace(client, model=client.first_model(), patience_s=args.patience)


def _advice(reason: object, base_url: str) -> str:
    """What to look at where no connection came about for this reason."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        return "Set SSL_CERT_FILE to a file with the certificate of who signed the server's, or with the server's own."
    if isinstance(reason, ssl.SSLError):
        return "If the server speaks plain HTTP, begin the URL with http://."
    if isinstance(reason, RemoteDisconnected) and base_url.startswith("http:"):
        return "If the server speaks HTTPS, begin the URL with https://."
    return "Is the server running?"


def _body_of(error: urllib.error.HTTPError) -> str:
    try:
        return error.read().decode(errors="replace")[:500]
    except (OSError, HTTPException):
        return "the answer broke off"


def _retry_after_s(headers: HTTPMessage) -> float:
    """What the server asks for in seconds; 0 if it says nothing, or a date."""
    try:
        return max(0.0, float(headers.get("Retry-After", 0)))
    except ValueError:
        return 0.0


def in_parallel(function: Callable[[T], R], items: Iterable[T], concurrency: int) -> Iterator[R]:
    """Results in the order of the items. After the first error no new item is begun; those that run are left to end."""
    stop = threading.Event()

    def guarded(item: T) -> R | None:
        if stop.is_set():
            return None
        try:
            return function(item)
        except BaseException:
            stop.set()
            raise

    pool = ThreadPoolExecutor(max_workers=concurrency)
    try:
        for result in pool.map(guarded, items):
            if result is not None:
                yield result
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)  # a server that hangs must hold nobody up
