"""Error bodies as Anthropic's clients read them. They serve every path below `PREFIX`, those without a route too."""

from typing import Any

from server.errors import ApiError

PREFIX = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether clients of Anthropic's API use this path."""
    return path == PREFIX or path.startswith(PREFIX + "/")


def anthropic_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """The error body. It has no place for the field at fault, so the message names that.

    Other statuses of 4xx than the known ones mean that the request is at fault, too.
    """
    default = "invalid_request_error" if error.status < 500 else "api_error"
    is_named = error.param is None or error.param in error.message
    message = error.message if is_named else f"{error.param}: {error.message}"
    shown = {"type": _TYPES.get(error.status, default), "message": message}
    return {"type": "error", "error": shown, "request_id": request_id}
