"""What surrounds every route: request ids, the key check, error bodies for whatever goes wrong, and counting."""

import hmac
import logging
import re
import uuid

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError, Unauthorized, body_of, internal_error
from server.metrics import Metrics

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health/live", "/health/ready"})
"""The only paths that never need a key."""

_CLIENT_LEFT = 499  # what proxies write in their logs; nobody receives it
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")


def error_response(error: ApiError) -> Response:
    """The HTTP response of an `ApiError`."""
    body = orjson.dumps(body_of(error))
    return Response(body, error.status, headers=dict(error.headers), media_type="application/json")


class Surround:
    """Outermost part of the app."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, api_key: str | None) -> None:
        self._app = app
        self._metrics = metrics
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request. Nothing but cancellation escapes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check_key(scope["path"], headers)
            await self._app(scope, receive, send_counted)
        except ApiError as error:
            await error_response(error)(scope, receive, send_counted)
        except ClientDisconnect:
            if not status:
                await Response(status_code=_CLIENT_LEFT)(scope, receive, send_counted)
        except Exception:
            log.exception("request %s failed: %s %s", request_id, scope["method"], scope["path"])
            if status:
                raise  # the response has begun: let the server cut the connection
            await error_response(internal_error(request_id))(scope, receive, send_counted)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.responses.labels(route, str(status)).inc()

    def _check_key(self, path: str, headers: Headers) -> None:
        """Deny by default: whatever is not in `OPEN_PATHS` needs the key, whether such a route exists or not."""
        if self._api_key is None or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._api_key):
            raise Unauthorized("a valid key is needed: send it as 'Authorization: Bearer KEY'")
