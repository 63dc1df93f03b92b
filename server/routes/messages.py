"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients send them."""

import uuid

from fastapi import APIRouter
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from engine.types import EngineInfo
from server.anthropic.conversation import chat_request, our_names
from server.anthropic.renderer import AnthropicRenderer
from server.body import read_body
from server.context import ServerContext
from server.convert import MAX_CONTEXTS, Converter
from server.errors import ContextTooLong, Unavailable
from server.openapi import COUNTS, GENERATES, describe
from server.respond import Asked, json_response, respond
from server.schema.anthropic import (
    AnthropicAnswer,
    AnthropicErrorBody,
    AnthropicEvent,
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
)

router = APIRouter()


@router.post(
    "/v1/messages",
    **describe(
        AnthropicAnswer, errors=GENERATES, body=MessagesRequest, event=AnthropicEvent, error_body=AnthropicErrorBody
    ),
)
async def create_message(request: Request) -> Response:
    """Continue a conversation, as Anthropic's API does."""
    return await respond(request, MessagesRequest, _prepare)


@router.post(
    "/v1/messages/count_tokens",
    **describe(TokenCount, errors=COUNTS, body=CountTokensRequest, error_body=AnthropicErrorBody),
)
async def count_tokens(request: Request) -> Response:
    """Tokens that the prompt of such a request has."""
    context: ServerContext = request.app.state.context
    wire, lane = await read_body(request, CountTokensRequest, context)
    context.model_name(wire.model)
    info = context.engine.info
    if info is None:
        raise Unavailable("the model is still loading")
    count: TokenCount = {"input_tokens": await lane.run(request.receive, _count, context.converter, wire, info)}
    return json_response(count)


def _prepare(asked: Asked[MessagesRequest]) -> AnthropicRenderer:
    message_id = f"msg_{uuid.uuid4().hex}"
    with our_names():
        prepared = asked.context.converter.chat(chat_request(asked.wire), asked.info, message_id)
    shows_thinking = asked.wire.thinking is None or asked.wire.thinking.display != "omitted"
    return AnthropicRenderer(prepared, model=asked.model, message_id=message_id, shows_thinking=shows_thinking)


def _count(converter: Converter, wire: CountTokensRequest, info: EngineInfo) -> int:
    """Prompts that are too long are counted, too, up to a few times the context."""
    most = MAX_CONTEXTS * info.max_model_len
    try:
        with our_names():
            roomy = replace(info, max_model_len=most + 1)  # `chat` leaves room for an answer
            return converter.chat(chat_request(wire), roomy, "count").num_prompt_tokens
    except ContextTooLong:
        raise ContextTooLong(
            f"the prompt has more than {most} tokens, {MAX_CONTEXTS} times this model's maximum context length: "
            "count it in parts"
        ) from None
