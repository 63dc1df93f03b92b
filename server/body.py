"""Request bodies: read within a limit, parse as JSON, check against a wire model. Every failure is an `ApiError`."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect, Request

from server.asker import asker_of
from server.context import ServerContext
from server.errors import BadRequest, BodyTooLarge, RequestTimeout
from server.lanes import LARGE_BODY_BYTES, ClientLane
from server.schema.common import path_of
from server.schema.limits import MAX_CONTAINERS, MAX_NESTING, is_too_deep

Model = TypeVar("Model", bound=BaseModel)
_MAX_NAME_CHARS = 64
_INT64 = 2**63
MAX_IGNORED = 64
"""Unknown parameters that a tolerant service ignores: their names fill a header."""
NEVER_IGNORED = frozenset({
    "chat_template", "conversation", "function_call", "functions", "guided_choice", "guided_grammar", "guided_json",
    "guided_regex", "prompt",
})  # fmt: skip
"""Unknown parameters that a tolerant service refuses, too: each makes a part of the prompt, or binds the answer."""


async def read_body(request: Request, model: type[Model], context: ServerContext) -> tuple[Model, ClientLane]:
    """The body as a checked wire model, and the lane for further work on it. A large body is parsed in its lane.

    Raises:
        RequestTimeout: it did not come within `receive_timeout`.
        BodyTooLarge: more than `max_body_bytes`, seen from the header or, without reading on, from the data.
        BadRequest: compressed, no JSON, or not what the model allows; names the field.
        TooManyRequests: too many large bodies wait to be parsed.
        ClientDisconnect: the client left while sending, or before the body was parsed.
    """
    config = context.config
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise BadRequest(
            f"Content-Encoding '{coding[:_MAX_NAME_CHARS]}' is not supported: send the body as it is",
            code="unsupported_content_encoding",
        )
    try:
        async with asyncio.timeout(config.receive_timeout):
            data = await _read_limited(request, config.max_body_bytes)
    except TimeoutError:
        raise RequestTimeout(f"the body did not come within {config.receive_timeout:g} s") from None
    client, _ = asker_of(request, config)
    lane = context.lanes.of(len(data)).for_client(client)
    ignored = request.state.ignored if config.tolerant else None
    if len(data) <= LARGE_BODY_BYTES:
        return _parse(data, model, ignored), lane
    return await lane.run(request.receive, _parse, data, model, ignored), lane


def _parse(data: bytes, model: type[Model], ignored: list[str] | None = None) -> Model:
    """Parse and check a body. Lists and objects are counted first: orjson could spend a second on too many of them.

    What is nested deeper than `MAX_NESTING` is refused, so that parts of a body can always be written as JSON again.
    With a list, parameters that the model does not know, but for `NEVER_IGNORED`, are added to it instead of refused.
    """
    num_openings = _num_openings(data)
    if num_openings > MAX_CONTAINERS and _num_openings(_without_strings(data)) > MAX_CONTAINERS:
        raise BadRequest(
            f"the body holds more than the {MAX_CONTAINERS} lists and objects that are accepted", code="invalid_json"
        )
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {_why_no_json(data, error)}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    if num_openings > MAX_NESTING:
        _check_nesting(content)
    if ignored is not None:
        ignored += _take_unknown(content, model)
    return checked(model, content)


def checked(model: type[Model], content: Mapping[str, Any]) -> Model:
    """The wire model of some content. Raises BadRequest naming the field."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _first_problem(error) from None


def _take_unknown(content: dict[str, Any], model: type[Model]) -> list[str]:
    """Remove the parameters that the model does not know, and that may be ignored; returns the names of those set."""
    unknown = [name for name in content if name not in model.model_fields and name not in NEVER_IGNORED]
    if len(unknown) > MAX_IGNORED:
        raise BadRequest(f"the body has more than {MAX_IGNORED} unknown parameters", code="unknown_parameter")
    return [name[:_MAX_NAME_CHARS] for name in unknown if content.pop(name) is not None]


def _why_no_json(data: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as fault:
        return f"byte {fault.start} is not UTF-8"
    return f"{error.msg} at character {error.pos}"


async def _read_limited(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise BodyTooLarge(f"the body has {length} bytes: at most {max_bytes} are accepted")
    data = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        data += message.get("body", b"")
        if len(data) > max_bytes:
            raise BodyTooLarge(f"the body has more than the {max_bytes} bytes that are accepted")
        if not message.get("more_body", False):
            return bytes(data)


def _num_openings(data: bytes) -> int:
    """Lists and objects that begin in JSON text, and brackets inside its strings."""
    return data.count(b"[") + data.count(b"{")


def _without_strings(data: bytes) -> bytes:
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left begins or ends a string
    return b"".join(unescaped.split(b'"')[::2])


def _check_nesting(content: Mapping[str, Any]) -> None:
    for name, value in content.items():
        if is_too_deep(value):
            param = name[:_MAX_NAME_CHARS]
            raise BadRequest(f"{param}: lists and objects are nested more than {MAX_NESTING} deep", param=param)


def _first_problem(error: ValidationError) -> BadRequest:
    """The first thing wrong, in words that name the field and show no value of the user's."""
    problem = error.errors(include_url=False)[0]
    path = path_of(problem["loc"], _MAX_NAME_CHARS)
    if problem["type"] == "extra_forbidden":
        return BadRequest(f"unknown parameter '{path}': it is not supported", param=path, code="unknown_parameter")
    if problem["type"] == "missing":
        return BadRequest(f"{path} is missing", param=path, code="missing_required_parameter")
    context = problem.get("ctx", {})
    path = ".".join(filter(None, (path, context.get("param", ""))))
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "int_type" and isinstance(problem["input"], float) and abs(problem["input"]) >= _INT64:
        text = f"an integer must be between {-_INT64} and {_INT64 - 1}"  # orjson reads others as floats
    return BadRequest(f"{path}: {text}" if path else text, param=path or None, code="invalid_value")


def component_schemas(models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """JSON schemas for the `components` of an OpenAPI document, by name."""
    _, schema = models_json_schema([(m, "validation") for m in models], ref_template="#/components/schemas/{model}")
    return dict(schema.get("$defs", {}))


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The part of a route's OpenAPI entry that describes its body."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
