"""Describes routes in the OpenAPI document: bodies, answers, streams and errors.

Routes read their bodies themselves, so the framework cannot describe them.
"""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter
from starlette.responses import Response

from server import deadline
from server.body import body_of, component_schemas
from server.schema.anthropic import CountTokensRequest, MessagesRequest
from server.schema.chat import ChatCompletionRequest
from server.schema.completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from server.schema.operations import ErrorBody
from server.schema.orders import AbortRequest
from server.schema.responses import ResponsesRequest

_BODIES = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
    AbortRequest,
)
_ERRORS = {
    400: "A field is wrong or not supported, or the body is not JSON",
    401: "No key, or the wrong one",
    403: "The key does not open this path",
    404: "This model is not served here",
    408: "The body did not come in time",
    413: "The body is too large",
    429: "Too many requests are waiting",
    499: "Someone has aborted the request",
    500: "The service or its engine failed",
    503: "Loading, draining, stalled, without an engine, or its stored answers cannot be reached",
    504: "The answer was not complete in the time that the request gave it",
}
ANY = (401, 500)
"""Errors of every route."""
FOR_OPERATORS = (401, 403, 500)
"""Errors of a route that may need the admin key."""
TAKES_A_BODY = (400, 401, 404, 408, 413, 429, 500)
COUNTS = (*TAKES_A_BODY, 503)
GENERATES = (*COUNTS, 499, 504)
"""Errors of a route that makes answers."""


def describe(
    answer: Any,
    *,
    errors: tuple[int, ...] = ANY,
    body: type[BaseModel] | None = None,
    is_streamed: bool = False,
    event: Any = None,
    error_body: Any = ErrorBody,
) -> dict[str, Any]:
    """Keyword arguments of a route's decorator; `answer` is the type of its JSON.

    A streamed answer is chunks of that type, closed by [DONE], or events of the type `event`.
    """
    responses: dict[int, Any] = {200: {"model": answer, "description": "The answer"}}
    if is_streamed:
        responses[200]["content"] = {"text/event-stream": {"schema": _chunk_stream(answer)}}
    if event is not None:
        responses[200]["content"] = {"text/event-stream": {"schema": _event_stream(event)}}
    responses |= {status: {"model": error_body, "description": _ERRORS[status]} for status in sorted(errors)}
    extra: dict[str, Any] = {} if body is None else body_of(body)
    if errors is GENERATES:
        extra["parameters"] = [deadline.PARAMETER]
    return {"response_class": Response, "responses": responses, "openapi_extra": extra}


def describe_health(answer: Any) -> dict[str, Any]:
    """The same for a health route, which needs no key and has the same body in a 503."""
    responses = {
        200: {"model": answer, "description": "Yes"},
        503: {"model": answer, "description": "No; the body says why"},
        500: {"model": ErrorBody, "description": _ERRORS[500]},
    }
    return {"response_class": Response, "responses": responses, "openapi_extra": {"security": []}}


def describe_text(media_type: str) -> dict[str, Any]:
    """The same for a route whose answer is text, and which may need the admin key."""
    described = describe(str, errors=FOR_OPERATORS)
    content = {media_type: {"schema": {"type": "string"}}}
    return {**described, "responses": {**described["responses"], 200: {"content": content, "description": "The text"}}}


def _event_stream(event: Any) -> dict[str, Any]:
    """The schema of one event that has a name and is JSON of this type. It refers to parts of the whole answer."""
    payload = TypeAdapter(event).json_schema(ref_template="#/components/schemas/{model}")
    payload.pop("$defs", None)  # the whole answer, in the same document, has defined them
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": payload}
    properties = {"event": {"type": "string"}, "data": data}
    return {"type": "object", "required": ["event", "data"], "properties": properties}


def _chunk_stream(answer: Any) -> dict[str, Any]:
    """The schema of one event that is a chunk of an answer."""
    kinds = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in (answer, ErrorBody)]
    data = {
        "description": "each event is JSON whose choices hold what is new; the last is [DONE], or an error",
        "anyOf": [
            {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}},
            {"const": "[DONE]"},
        ],
    }
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def complete_document(app: FastAPI, *, has_key: bool) -> None:
    """Add the schemas of bodies and the key (if any) to `app.openapi()`, and drop the 422, which no route gives."""
    make_document = app.openapi

    def openapi() -> dict[str, Any]:
        document = make_document()
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        schemas.update(component_schemas(_BODIES))
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        if has_key:
            components["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
            document["security"] = [{"key": []}, {"header": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]
