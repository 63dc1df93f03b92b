"""POST /v1/chat/completions."""

import uuid

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.asker import asker_of
from server.body import read_body
from server.chat_answer import ChatAnswer
from server.context import ServerContext
from server.openapi import GENERATES, describe
from server.respond import respond
from server.schema.chat import ChatCompletion, ChatCompletionRequest

router = APIRouter()


@router.post(
    "/v1/chat/completions", **describe(ChatCompletion, errors=GENERATES, body=ChatCompletionRequest, is_streamed=True)
)
async def chat_completions(request: Request) -> Response:
    """Continue a conversation."""
    context: ServerContext = request.app.state.context
    wire, lane = await read_body(request, ChatCompletionRequest, context)
    context.metrics.ignored_keys.inc(by=wire.num_ignored_keys)
    model = context.model_name(wire.model)
    client, _ = asker_of(request, context.config)
    info = context.ready_info(wire.n or 1, client)
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    prepared = await lane.run(request.receive, context.converter.chat, wire, info, request_id)
    answer = ChatAnswer(
        prepared, context.converter.tokenizer, model=model, request_id=request_id, logprobs=bool(wire.logprobs)
    )
    return await respond(request, context, answer, stream=wire.stream, options=wire.stream_options)
