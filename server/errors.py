"""Errors a client can see, as a tree, and the one body they all have. Knows no framework.

Exception
├── ApiError                  carries status, type, code and the request field to change
│   ├── BadRequest            400 a field is wrong or not supported
│   ├── ContextTooLong        400 prompt, or prompt plus answer, exceed the context
│   ├── Unauthorized          401 no key, or the wrong one
│   ├── Forbidden             403 the key does not open this path
│   ├── ModelNotFound         404 a model that is not served here
│   ├── ResponseNotFound      404 no stored answer of this id
│   ├── RequestTimeout        408 the body did not come in time
│   ├── BodyTooLarge          413
│   ├── TooManyRequests       429 the queue is full, or the key has used what it may
│   ├── Aborted               499 someone has ended this request by its id
│   ├── EngineFailed          500 the engine could not finish this request
│   ├── Unavailable           503 loading, draining, without an engine, or without its stored answers
│   └── DeadlineExceeded      504 the answer was not complete in the time that the request gave it
├── SettingError              the service cannot start as configured
└── StartError                the service cannot start, though its settings may be right
"""

from collections.abc import Mapping
from typing import Any, Literal

Exhausted = Literal["queue", "bodies", "key"]
"""What a client can be refused for: places at the engine, places of large bodies, or what its key may use."""


class ApiError(Exception):
    """An answer that is an error; `param` is the request field it is about."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that belong to this kind of error."""
        return {}


class BadRequest(ApiError):
    """A field of the request is wrong or not supported."""

    status = 400
    type = "invalid_request_error"


class ContextTooLong(BadRequest):
    """The prompt, or the prompt and the answer asked for, do not fit in the model's context."""

    code = "context_length_exceeded"


class Unauthorized(ApiError):
    """The key is missing or wrong."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    @property
    def headers(self) -> Mapping[str, str]:
        """Says how to authenticate."""
        return {"WWW-Authenticate": "Bearer"}


class Forbidden(ApiError):
    """The key is known, but does not open this path."""

    status = 403
    type = "invalid_request_error"
    code = "insufficient_permissions"


class ModelNotFound(ApiError):
    """The model named is not served here."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class ResponseNotFound(ApiError):
    """There is no stored answer of this id, or it is another client's."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class RequestTimeout(ApiError):
    """The client was too slow to send its body; the rest of it is not awaited."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"

    @property
    def headers(self) -> Mapping[str, str]:
        """What still comes belongs to this request, so the connection is of no more use."""
        return {"Connection": "close"}


class BodyTooLarge(ApiError):
    """The body exceeds the limit; the rest of it is not read."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class TooManyRequests(ApiError):
    """The bounded queue is full, or a key has used what it may; `retry_after_s` is when to ask again.

    `what` has run out; metrics have it as a label.
    """

    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    retry_after_s = 1
    what: Exhausted = "queue"

    @property
    def headers(self) -> Mapping[str, str]:
        """When to ask again."""
        return {"Retry-After": str(self.retry_after_s)}


class Aborted(ApiError):
    """Someone has ended this request by its id. Clients do not try it again."""

    status = 499
    type = "invalid_request_error"
    code = "aborted"


class EngineFailed(ApiError):
    """The engine could not finish this request."""

    code = "engine_error"


class Unavailable(ApiError):
    """The service cannot do this now: it loads, drains, has lost its engine, or cannot reach its stored answers."""

    status = 503
    code = "unavailable"

    @property
    def headers(self) -> Mapping[str, str]:
        """Loading and restarts take seconds."""
        return {"Retry-After": "5"}


class DeadlineExceeded(ApiError):
    """The answer was not complete in the time that the request gave it."""

    status = 504
    code = "deadline_exceeded"

    @property
    def headers(self) -> Mapping[str, str]:
        """Clients of OpenAI and Anthropic would try again, each time for as long."""
        return {"x-should-retry": "false"}


class SettingError(ValueError):
    """The service cannot start as configured; the message names the flag and the way out."""


class StartError(Exception):
    """The service cannot start now, though its settings may be right: the machine, the hub or the engine fails."""


def chain_of(error: BaseException) -> list[BaseException]:
    """The error and what caused it, outermost first."""
    causes: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in causes:
        causes.append(current)
        current = current.__cause__ or current.__context__
    return causes


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The OpenAI error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def internal_error(request_id: str) -> ApiError:
    """What a client is told about a fault of ours."""
    return ApiError(f"internal error; the service's log has it under request id {request_id}")


def body_of(error: ApiError) -> dict[str, Any]:
    """The OpenAI error object of an `ApiError`."""
    return error_body(error.message, error.type, error.param, error.code)
