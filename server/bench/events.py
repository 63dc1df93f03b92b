"""`AnswerReader`: turns the bytes of a streamed answer into times and token counts. Does no I/O.

The server may count tokens in three ways, the best of which is used:

    per chunk   every chunk with text has a usage that counts at least one token
                (`stream_options.continuous_usage_stats`): tokens without text count too
    usage       only the last chunk has one: the total is right; each chunk with text counts as one token in between
    chunks      no usage at all: each chunk with text counts as one token
"""

from array import array
from typing import Any

import orjson

from server.bench.config import MAX_TOKENS
from server.bench.errors import BadResponse, RequestFailed

_DONE = b"[DONE]"
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal")
_MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventSplitter:
    """Server-sent events out of bytes that may be cut anywhere. Lines end in LF, CR LF or CR."""

    def __init__(self) -> None:
        self._rest = b""
        self._ended_in_cr = False
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the events that are complete now; comments and other fields are left out."""
        if self._ended_in_cr:
            data = data.removeprefix(b"\n")  # the other half of the last line's end
        self._ended_in_cr = data.endswith(b"\r")
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise BadResponse(f"an event of more than {_MAX_EVENT_BYTES} bytes")
        payloads = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                payloads.append(b"\n".join(self._data))
                self._data.clear()
        return payloads


class AnswerReader:
    """`feed` the body of one streamed answer. Times are those of the caller's clock, in seconds.

    `times` and `counts` have an entry for each chunk that brought tokens: when, and how many.
    """

    def __init__(self) -> None:
        self.times = array("d")
        self.counts = array("L")
        self.prompt_tokens: int | None = None
        self._reported_tokens: int | None = None
        self._counted_tokens = 0
        self._counts_by_usage = True  # until a chunk with text has no usage, or one that counts no token yet
        self._has_finish_reason = False
        self._is_done = False
        self._splitter = EventSplitter()

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer so far, by the server's count where it gives one."""
        return self._counted_tokens if self._reported_tokens is None else self._reported_tokens

    @property
    def counting(self) -> str:
        """How the tokens were counted: "per chunk", "usage" or "chunks"."""
        if self._reported_tokens is None:
            return "chunks"
        return "per chunk" if self._counts_by_usage else "usage"

    def feed(self, data: bytes, now_s: float) -> None:
        """Take in bytes that arrived at `now_s`.

        Raises:
            RequestFailed: an event that is an error, or is not JSON.
        """
        for payload in self._splitter.feed(data):
            if payload == _DONE:
                self._is_done = True
                continue
            try:
                chunk = orjson.loads(payload)
            except orjson.JSONDecodeError:
                raise BadResponse(f"an event that is not JSON: {payload[:80]!r}") from None
            if not isinstance(chunk, dict):
                raise BadResponse(f"an event that is no object: {payload[:80]!r}")
            self._add(chunk, now_s)

    def finish(self) -> None:
        """The response is complete. Raises RequestFailed if the answer is not, or is empty."""
        if not self._is_done and not self._has_finish_reason:
            raise RequestFailed("cut short", "the stream ended without [DONE] and without a finish_reason")
        if not self.output_tokens:
            raise RequestFailed("no tokens", "the answer has no tokens")

    def _add(self, chunk: dict[str, Any], now_s: float) -> None:
        if chunk.get("error") is not None:
            raise RequestFailed("error in stream", message_of(chunk))
        choices, usage = _choices(chunk), _as_object(chunk.get("usage"))
        has_text = any(_has_text(choice) for choice in choices)
        self._has_finish_reason = self._has_finish_reason or any(c.get("finish_reason") for c in choices)
        prompt_tokens, reported = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        if prompt_tokens is not None:
            self.prompt_tokens = prompt_tokens
        if reported is not None:
            self._reported_tokens = reported
        if has_text and not reported:
            self._counts_by_usage = False
        if not self._counts_by_usage:
            num_new = int(has_text)
        elif choices and self._reported_tokens is not None:
            num_new = self._reported_tokens - self._counted_tokens
        else:
            num_new = 0
        if num_new > 0:
            self.times.append(now_s)
            self.counts.append(num_new)
            self._counted_tokens += num_new


def message_of(body: Any) -> str:
    """The message of an OpenAI-style error, or the start of whatever it is."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:300]


def error_text(body: bytes) -> str:
    """The message in the body of a response that is an error."""
    try:
        return message_of(orjson.loads(body))
    except orjson.JSONDecodeError:
        return body[:300].decode(errors="replace")


def _as_object(part: Any) -> dict[str, Any]:
    """A part of an event that must be an object; null stands for an empty one. Raises BadResponse."""
    if part is None:
        return {}
    if not isinstance(part, dict):
        raise BadResponse(f"a part of an event is no object: {str(part)[:80]}")
    return part


def _choices(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    choices = chunk.get("choices") or []
    if not isinstance(choices, list):
        raise BadResponse(f"choices is no list: {str(choices)[:80]}")
    return [_as_object(choice) for choice in choices]


def _count(usage: dict[str, Any], name: str) -> int | None:
    """The tokens that a usage counts, None where it does not say. Raises BadResponse."""
    count = usage.get(name)
    if count is not None and (type(count) is not int or not 0 <= count <= MAX_TOKENS):
        raise BadResponse(f"usage.{name} is {str(count)[:40]!r}: it must be a whole number up to {MAX_TOKENS}")
    return count


def _has_text(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = _as_object(choice.get("delta"))
    return any(delta.get(name) for name in _TEXT_FIELDS) or bool(delta.get("tool_calls"))
