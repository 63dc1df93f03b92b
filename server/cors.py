"""`Cors`: lets browser pages of other origins call the API. It is outermost, so preflights need no key."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from server.errors import BadRequest
from server.middleware import error_response, request_id_of


class Cors(CORSMiddleware):
    """Starlette's middleware with our error body. Keys travel in a header, so no cookies are allowed."""

    def __init__(self, app: ASGIApp, *, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],  # HEAD needs no permission
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Request-Id", "Retry-After", "X-Should-Retry", "X-Ignored-Parameters"],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a preflight; a refusal says whether origin, method or headers are at fault."""
        response = super().preflight_response(request_headers)
        if response.status_code != 200:
            refusal = error_response(BadRequest(bytes(response.body).decode(), code="cors_refused"))
            refusal.headers["vary"] = response.headers["vary"]
            response = refusal
        response.headers["x-request-id"] = request_id_of(request_headers)
        return response
