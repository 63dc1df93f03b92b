"""POST /v1/responses, and GET and DELETE of stored answers."""

import asyncio
import uuid

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.asker import owner_of
from server.context import ServerContext
from server.errors import BadRequest, ResponseNotFound
from server.openapi import GENERATES, describe
from server.respond import Asked, json_response, respond
from server.responses.conversation import chat_request, our_names
from server.responses.renderer import Keeping, ResponsesRenderer
from server.responses.store import ResponseStore
from server.schema.responses import DeletedResponse, InputItem, ResponseBody, ResponseEvent, ResponsesRequest

router = APIRouter()
_STORED = (400, 401, 404, 500)


@router.post("/v1/responses", **describe(ResponseBody, errors=GENERATES, body=ResponsesRequest, event=ResponseEvent))
async def create_response(request: Request) -> Response:
    """Answer text or a list of items."""
    return await respond(request, ResponsesRequest, _prepare)


@router.get("/v1/responses/{response_id}", **describe(ResponseBody, errors=_STORED))
async def show_response(request: Request, response_id: str) -> Response:
    """A stored answer."""
    for name in request.query_params:
        raise BadRequest(f"{name[:64]}: a stored answer is returned whole, as it was made", param=name[:64])
    body = await asyncio.to_thread(_store(request).body, owner_of(request), response_id)
    if body is None:
        raise _not_found(response_id)
    return Response(body, media_type="application/json")


@router.delete("/v1/responses/{response_id}", **describe(DeletedResponse, errors=_STORED))
async def delete_response(request: Request, response_id: str) -> Response:
    """Remove a stored answer. Answers that follow it stay, with their whole conversations."""
    if not await asyncio.to_thread(_store(request).delete, owner_of(request), response_id):
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


def _not_found(response_id: str) -> ResponseNotFound:
    return ResponseNotFound(f"there is no stored answer '{response_id[:100]}'", param="response_id")
