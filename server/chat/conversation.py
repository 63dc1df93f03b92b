"""`Conversation`: messages so far, and the next answer streamed from any OpenAI-compatible server. Prints nothing."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx2

from server.bench.errors import BadResponse
from server.bench.events import EventSplitter
from server.tls import HTTPS_HINT, tls_failure

_TIMEOUT = httpx2.Timeout(600.0, connect=10.0)  # a long prompt may wait in a queue
_REASONING = ("reasoning", "reasoning_content")  # two names that servers use


class ChatError(Exception):
    """The server cannot be asked, or refused; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: text of its reasoning or content, or how it ended."""

    kind: Literal["reasoning", "content", "end"]
    text: str  # of an end: the finish reason
    num_tokens: int | None = None  # of an end, if the server told


@dataclass(kw_only=True, slots=True)
class Conversation:
    """Turns with one model. `fields` are further fields of every request; `base_url` ends in /v1."""

    base_url: str
    model: str
    api_key: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def answer(self, question: str) -> Iterator[Piece]:
        """Stream the answer. Leaving early keeps what came so far; without any content the question is forgotten.

        Raises:
            ChatError: the server refused, broke off, or is not there.
        """
        self.turns.append({"role": "user", "content": question})
        content: list[str] = []
        try:
            for piece in self._pieces():
                if piece.kind == "content":
                    content.append(piece.text)
                yield piece
        finally:
            if content:
                self.turns.append({"role": "assistant", "content": "".join(content)})
            else:
                self.turns.pop()

    def _pieces(self) -> Iterator[Piece]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        body = {
            "model": self.model,
            "messages": [*system, *self.turns],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        _check_text(body)
        reason, num_tokens = "", None
        with (
            _errors_named(self.base_url),
            _client(self.base_url, self.api_key) as client,
            client.stream("POST", f"{self.base_url}/chat/completions", json=body) as response,
        ):
            if response.status_code != httpx2.codes.OK:
                response.read()
                raise ChatError(error_text(response))
            for event in _events(response, self.base_url):
                if "error" in event:
                    raise ChatError(str(event["error"].get("message", event["error"])))
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
                for choice in event.get("choices", ()):
                    yield from _texts(choice.get("delta", {}))
                    reason = choice.get("finish_reason") or reason
        if not reason:
            raise ChatError("the server broke off its answer")
        yield Piece("end", reason, num_tokens)


def served_models(base_url: str, api_key: str | None) -> list[str]:
    """Names that the server lists. Raises ChatError."""
    with _errors_named(base_url), _client(base_url, api_key) as client:
        response = client.get(f"{base_url}/models")
        if response.status_code != httpx2.codes.OK:
            raise ChatError(error_text(response))
        return [entry["id"] for entry in response.json()["data"]]


def _client(base_url: str, api_key: str | None) -> httpx2.Client:
    keys = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    # Certificates take a while to read, and plain HTTP needs none.
    try:
        return httpx2.Client(timeout=_TIMEOUT, headers=keys, verify=base_url.startswith("https:"))
    except OSError as error:  # of the file of SSL_CERT_FILE, if it has no certificates
        file = os.environ.get("SSL_CERT_FILE")
        raise ChatError(f"SSL_CERT_FILE is {file!r}: {error}: name a file with certificates") from error


def error_text(response: httpx2.Response) -> str:
    """What a refusal says, with its status."""
    try:
        said = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = response.text[:200]
    return f"HTTP {response.status_code}: {said}"


@contextmanager
def _errors_named(base_url: str) -> Iterator[None]:
    try:
        yield
    except httpx2.ConnectError as error:
        if (reason := tls_failure(error)) is not None:
            raise ChatError(f"cannot connect to {base_url}: {reason}") from error
        raise ChatError(
            f"no server answers at {base_url} ({error}): start one with `moe-serve`, or name another by --base-url"
        ) from error
    except httpx2.HTTPError as error:
        may_be_https = isinstance(error, httpx2.RemoteProtocolError) and base_url.startswith("http:")
        hint = HTTPS_HINT if may_be_https else ""
        raise ChatError(f"the connection to {base_url} failed: {error or type(error).__name__}{hint}") from error
    except (BadResponse, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ChatError(f"{base_url} does not speak OpenAI's API: {error!r}") from error


def _check_text(body: dict[str, Any]) -> None:
    """Raise ChatError for bytes that are no text, which Python reads as lone surrogates."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ChatError("the question, or the system prompt, is not UTF-8 text") from error


def _events(response: httpx2.Response, base_url: str) -> Iterator[dict[str, Any]]:
    """Split as SSE says; `iter_lines` cuts at U+2028 too, which may stand in a text."""
    splitter = EventSplitter()
    try:
        for data in response.iter_bytes():
            for payload in splitter.feed(data):
                if payload != b"[DONE]":
                    yield json.loads(payload)
    except httpx2.TransportError as error:
        raise ChatError(f"{base_url} broke off its answer: {error or type(error).__name__}") from error


def _texts(delta: dict[str, Any]) -> Iterator[Piece]:
    reasoning = next((delta[name] for name in _REASONING if delta.get(name)), None)
    if reasoning:
        yield Piece("reasoning", reasoning)
    if delta.get("content"):
        yield Piece("content", delta["content"])
