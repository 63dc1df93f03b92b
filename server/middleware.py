"""What happens around every route: request ids, the key check, HEAD, error bodies, and counting responses.

The key's number is in `request.state.key`, None without one. Names in `request.state.ignored` become a header. Spans
are in `request.state.trace`.
"""

import asyncio
import logging
import re
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import quote

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.logs import FIELDS
from server.anthropic.errors import anthropic_error, is_anthropic
from server.context import SHUT_DOWN
from server.errors import ApiError, Unavailable, body_of, internal_error
from server.keys import Keyring
from server.metrics import Metrics

if TYPE_CHECKING:
    from server.tracing import Trace

log = logging.getLogger(__name__)

MakeTrace = Callable[[Headers, str], "Trace"]
"""Makes the trace of a request with these headers and this id."""

_CLIENT_LEFT = 499  # what proxies write in their logs; nobody receives it
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def request_id_of(headers: Headers) -> str:
    """The client's own id for a request, if it is a fit one; else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def error_response(error: ApiError, scope: Scope | None = None) -> Response:
    """The HTTP response of an `ApiError`, in the words of the API that the request's path belongs to."""
    body = body_of(error)
    if scope is not None and is_anthropic(scope["path"]):
        body = anthropic_error(error, scope["state"]["request_id"])
    return Response(orjson.dumps(body), error.status, headers=dict(error.headers), media_type="application/json")


class RequestMiddleware:
    """Wraps the whole app; only `Cors` is further out."""

    def __init__(
        self, app: ASGIApp, *, metrics: Metrics, keyring: Keyring, make_trace: MakeTrace | None = None
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._keyring = keyring
        self._make_trace = make_trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request. Until the response has begun, every error becomes an error response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers)
        trace = None if self._make_trace is None else self._make_trace(headers, request_id)
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, key=None, ignored=[], trace=trace)
        sender = _Sender(send, scope)
        if sender.is_head:  # routes know GET only; uvicorn keeps its own scope, with HEAD
            scope = {**scope, "method": "GET"}
        try:
            await self._answer(scope, receive, sender)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.responses.inc(route, str(sender.status))
            if trace is not None:
                trace.end(sender.status)

    async def _answer(self, scope: Scope, receive: Receive, sender: "_Sender") -> None:
        request_id = sender.request_id
        try:
            scope["state"]["key"] = self._keyring.check(scope["path"], Headers(scope=scope))
            await self._app(scope, receive, sender)
        except ApiError as error:
            await error_response(error, scope)(scope, receive, sender)
        except ClientDisconnect:
            if not sender.status:
                await Response(status_code=_CLIENT_LEFT)(scope, receive, sender)
        except asyncio.CancelledError:  # the server is stopping and no longer waits
            if sender.status:
                raise
            await error_response(Unavailable(SHUT_DOWN), scope)(scope, receive, sender)
        except Exception:
            fields = {"request_id": request_id}
            log.exception(
                "request %s failed: %s %s", request_id, scope["method"], scope["path"], extra={FIELDS: fields}
            )
            if sender.status:
                raise  # the response has begun: let the server cut the connection
            await error_response(internal_error(request_id), scope)(scope, receive, sender)


class _Sender:
    """Sends a response with its request id, and without a body for HEAD. `status` is 0 until it begins."""

    def __init__(self, send: Send, scope: Scope) -> None:
        self._send = send
        self.request_id: str = scope["state"]["request_id"]
        self.is_head: bool = scope["method"] == "HEAD"
        self._ignored: list[str] = scope["state"]["ignored"]
        self._names = [b"x-request-id", *([b"request-id"] if is_anthropic(scope["path"]) else [])]
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            ids = [(name, self.request_id.encode()) for name in self._names]
            message["headers"] = [*message.get("headers", ()), *ids]
            if self._ignored:
                message["headers"].append((b"x-ignored-parameters", ", ".join(map(quote, self._ignored)).encode()))
        elif self.is_head:
            message = {**message, "body": b""}
        await self._send(message)
