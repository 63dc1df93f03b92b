"""POST /v1/responses, and GET and DELETE of stored answers."""

import asyncio
import logging
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.asker import owner_of
from server.context import ServerContext
from server.errors import BadRequest, ResponseNotFound, Unavailable
from server.openapi import GENERATES, describe
from server.respond import Asked, json_response, respond
from server.responses.conversation import chat_request, our_names
from server.responses.renderer import Keeping, ResponsesRenderer
from server.responses.store import ResponseStore
from server.schema.responses import (
    INCLUSIONS,
    LOGPROBS,
    DeletedResponse,
    InputItem,
    ResponseBody,
    ResponseEvent,
    ResponsesRequest,
)

log = logging.getLogger(__name__)

router = APIRouter()
_STORED = (400, 401, 404, 500, 503)
_WITHOUT_EFFECT = {
    "stream": ("false",),
    "include": INCLUSIONS,
    "include[]": INCLUSIONS,
    "include_obfuscation": ("true", "false"),
}
"""Query parameters and their values with which a stored answer is what it is without them."""


@router.post("/v1/responses", **describe(ResponseBody, errors=GENERATES, body=ResponsesRequest, event=ResponseEvent))
async def create_response(request: Request) -> Response:
    """Answer text or a list of items."""
    return await respond(request, ResponsesRequest, _prepare)


@router.get("/v1/responses/{response_id}", **describe(ResponseBody, errors=_STORED))
async def show_response(request: Request, response_id: str) -> Response:
    """A stored answer, whole and as it was made."""
    _check_query(request)
    with _unavailable_if_it_fails():
        body = await asyncio.to_thread(_store(request).body, owner_of(request), response_id)
    if body is None:
        raise _not_found(response_id)
    if LOGPROBS in request.query_params.values() and not _has_logprobs(orjson.loads(body)):
        raise BadRequest("include: this answer was made without log-probabilities", param="include")
    return Response(body, media_type="application/json")


@router.delete("/v1/responses/{response_id}", **describe(DeletedResponse, errors=_STORED))
async def delete_response(request: Request, response_id: str) -> Response:
    """Remove a stored answer. Answers that follow it stay, with their whole conversations."""
    with _unavailable_if_it_fails():
        is_removed = await asyncio.to_thread(_store(request).delete, owner_of(request), response_id)
    if not is_removed:
        raise _not_found(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _prepare(asked: Asked[ResponsesRequest]) -> ResponsesRenderer:
    wire, converter, store = asked.wire, asked.context.converter, asked.context.response_store
    if store is None and wire.store:
        raise BadRequest("store: this service stores no answers (--response-store)", param="store")
    history = _history(store, asked.owner, wire.previous_response_id)
    response_id = f"resp_{uuid.uuid4().hex}"
    with our_names():
        prepared = converter.chat(chat_request(wire, history), asked.info, response_id)
    keeping = None if store is None or wire.store is False else Keeping(store, asked.owner, history)
    return ResponsesRenderer(
        prepared, converter.tokenizer, wire, model=asked.model, response_id=response_id, keeping=keeping
    )


def _history(store: ResponseStore | None, owner: str, previous_id: str | None) -> list[InputItem]:
    """The items of the conversation that a request continues."""
    if previous_id is None:
        return []
    if store is None:
        raise BadRequest(
            "previous_response_id: this service stores no answers (--response-store): send the earlier items as input",
            param="previous_response_id",
        )
    with _unavailable_if_it_fails():
        items = store.items(owner, previous_id)
    if items is None:
        raise BadRequest(
            f"previous_response_id: there is no stored answer '{previous_id}'",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return [InputItem.model_validate(item) for item in items]


def _store(request: Request) -> ResponseStore:
    context: ServerContext = request.app.state.context
    if context.response_store is None:
        raise ResponseNotFound("this service stores no answers (--response-store)", param="response_id")
    return context.response_store


def _check_query(request: Request) -> None:
    """Refuse parameters that would change a stored answer or how it is sent."""
    for name, value in request.query_params.multi_items():
        if name not in _WITHOUT_EFFECT:
            raise BadRequest(f"{name[:64]}: a stored answer is returned whole, as it was made", param=name[:64])
        if value not in _WITHOUT_EFFECT[name]:
            known = " or ".join(_WITHOUT_EFFECT[name])
            raise BadRequest(f"{name}: '{value[:64]}' is not supported for a stored answer, only {known}", param=name)


def _has_logprobs(answer: ResponseBody) -> bool:
    parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    return all(part["logprobs"] for part in parts if part["text"])


@contextmanager
def _unavailable_if_it_fails() -> Iterator[None]:
    """Clients are told to ask again; the log has the reason, which may name files."""
    try:
        yield
    except sqlite3.Error as error:
        log.error("the stored responses cannot be used: %s", error)
        raise Unavailable(
            "the stored answers cannot be read or changed now (another program may lock their file): ask again"
        ) from error


def _not_found(response_id: str) -> ResponseNotFound:
    return ResponseNotFound(f"there is no stored answer '{response_id[:100]}'", param="response_id")
