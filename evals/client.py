"""Asks an OpenAI-compatible server many questions at once. Needs the standard library only."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class ServerError(RuntimeError):
    """The server refused a request or could not be reached; the message says which and why."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The final content, the calls as (name, arguments as JSON text), and the tokens that the server counted."""

    content: str
    calls: list[tuple[str, str]]
    tokens: int

    @property
    def text(self) -> str:
        """All that the user would see, in one string: the content, then a line per call."""
        return "\n".join([self.content, *(f"{name} {arguments}" for name, arguments in self.calls)])


@dataclass(frozen=True, kw_only=True)
class Client:
    """Where and how to ask. base_url ends in /v1."""

    base_url: str
    model: str = ""
    api_key: str = ""
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {self.base_url!r}: must start with http:// or https://")

    def get(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer to a GET, or to a POST if there is a body. Raises ServerError."""
        request = urllib.request.Request(
            self.base_url.rstrip("/") + path,
            data=json.dumps(body).encode() if body is not None else None,
            headers={"Content-Type": "application/json"}
            | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}),
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path}: status {error.code}: {error.read().decode(errors='replace')[:500]}") from error
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            raise ServerError(f"{self.base_url}{path} cannot be reached: {error}. Is the server running?") from error

    def first_model(self) -> str:
        """The name of the first model that the server lists."""
        return str(self.get("/models")["data"][0]["id"])

    def ask(self, messages: list[dict[str, Any]], **options: Any) -> Answer:
        """One chat completion."""
        reply = self.get("/chat/completions", {"model": self.model, "messages": messages} | options)
        message = reply["choices"][0]["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        return Answer(
            content=message.get("content") or "", calls=calls, tokens=int(reply["usage"]["completion_tokens"])
        )


def in_parallel(function: Callable[[T], R], items: Iterable[T], concurrency: int) -> Iterator[R]:
    """Results in the order of the items. After the first error no new item is begun."""
    stop = threading.Event()

    def guarded(item: T) -> R | None:
        if stop.is_set():
            return None
        try:
            return function(item)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        for result in pool.map(guarded, items):
            if result is not None:
                yield result
