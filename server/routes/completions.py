"""POST /v1/completions, and the tokenizer's routes: /tokenize, /detokenize, /tokenizer_info."""

import uuid

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.body import read_body
from server.context import ServerContext
from server.openapi import GENERATES, TAKES_A_BODY, describe
from server.renderers import CompletionRenderer
from server.respond import Asked, json_response, respond
from server.schema.completions import Completion, CompletionRequest, DetokenizeRequest, TokenizeRequest
from server.schema.operations import Text, TokenizerInfo, Tokens

router = APIRouter()


@router.post("/v1/completions", **describe(Completion, errors=GENERATES, body=CompletionRequest, is_streamed=True))
async def completions(request: Request) -> Response:
    """Continue one or several raw prompts."""
    return await respond(request, CompletionRequest, _prepare)


def _prepare(asked: Asked[CompletionRequest]) -> CompletionRenderer:
    request_id, converter = f"cmpl-{uuid.uuid4().hex}", asked.context.converter
    prepared = converter.completion(asked.wire, asked.info, request_id)
    return CompletionRenderer(prepared, converter.tokenizer, asked.wire, model=asked.model, request_id=request_id)


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


@router.get("/tokenizer_info", **describe(TokenizerInfo))
async def tokenizer_info(request: Request) -> Response:
    """What a client needs to use /tokenize instead of tokenizer files (lm-eval does)."""
    tokenizer = request.app.state.context.converter.tokenizer
    info: TokenizerInfo = {
        "bos_token": tokenizer.named_tokens.get("bos_token"),
        "eos_token": tokenizer.named_tokens.get("eos_token"),
        "add_bos_token": tokenizer.adds_bos,
        "vocab_size": tokenizer.vocab_size,
        "chat_template": None if tokenizer.chat_template is None else tokenizer.chat_template.text,
    }
    return json_response(info)


@router.post("/detokenize", **describe(Text, errors=TAKES_A_BODY, body=DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Text of ids, control tokens by name."""
    context: ServerContext = request.app.state.context
    wire, lane = await read_body(request, DetokenizeRequest, context)
    context.model_name(wire.model)
    text = await lane.run(request.receive, context.converter.detokenize, wire, context.engine.info)
    return json_response({"prompt": text})
