"""POST /v1/completions, and the tokenizer behind it: /tokenize, /detokenize."""

import uuid

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.body import read_body
from server.completion_answer import CompletionAnswer
from server.context import ServerContext
from server.openapi import GENERATES, TAKES_A_BODY, describe
from server.schema.completions import Completion, CompletionRequest, DetokenizeRequest, TokenizeRequest
from server.schema.operations import Text, Tokens
from server.serving import json_response, respond

router = APIRouter()


@router.post("/v1/completions", **describe(Completion, errors=GENERATES, body=CompletionRequest, is_streamed=True))
async def completions(request: Request) -> Response:
    """Continue one or several raw prompts."""
    context: ServerContext = request.app.state.context
    wire, lane = await read_body(request, CompletionRequest, context)
    model = context.model_name(wire.model)
    info = context.ready_info(len(wire.prompt) * (wire.n or 1))
    request_id = f"cmpl-{uuid.uuid4().hex}"
    job = await lane.run(request.receive, context.converter.completion, wire, info, request_id)
    answer = CompletionAnswer(job, context.converter.tokenizer, model=model, request_id=request_id, wire=wire)
    include_usage = wire.stream_options is not None and bool(wire.stream_options.include_usage)
    return await respond(request, context, answer, stream=bool(wire.stream), include_usage=include_usage)


@router.post("/tokenize", **describe(Tokens, errors=TAKES_A_BODY, body=TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Ids of a raw prompt, or of messages as the chat template renders them."""
    context: ServerContext = request.app.state.context
    wire, lane = await read_body(request, TokenizeRequest, context)
    context.model_name(wire.model)
    info = context.engine.info
    ids = await lane.run(request.receive, context.converter.tokenize, wire, info)
    return json_response(
        {"tokens": ids, "count": len(ids), "max_model_len": None if info is None else info.max_model_len}
    )


@router.post("/detokenize", **describe(Text, errors=TAKES_A_BODY, body=DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Text of ids, control tokens by name."""
    context: ServerContext = request.app.state.context
    wire, lane = await read_body(request, DetokenizeRequest, context)
    context.model_name(wire.model)
    text = await lane.run(request.receive, context.converter.detokenize, wire, context.engine.info)
    return json_response({"prompt": text})
