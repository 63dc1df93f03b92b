"""POST /v1/chat/completions."""

import uuid

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.openapi import GENERATES, describe
from server.renderers import ChatRenderer
from server.respond import Asked, respond
from server.schema.chat import ChatCompletion, ChatCompletionRequest

router = APIRouter()


@router.post(
    "/v1/chat/completions", **describe(ChatCompletion, errors=GENERATES, body=ChatCompletionRequest, is_streamed=True)
)
async def chat_completions(request: Request) -> Response:
    """Continue a conversation."""
    return await respond(request, ChatCompletionRequest, _prepare)


def _prepare(asked: Asked[ChatCompletionRequest]) -> ChatRenderer:
    request_id, converter = f"chatcmpl-{uuid.uuid4().hex}", asked.context.converter
    prepared = converter.chat(asked.wire, asked.info, request_id)
    return ChatRenderer(prepared, converter.tokenizer, asked.wire, model=asked.model, request_id=request_id)
