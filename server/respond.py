"""`respond`: answers a request to generate. Reads, prepares, runs, then streams events or folds them into one body.

When the client leaves, its requests end.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import orjson
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from engine.types import EngineInfo, EngineOutput
from server.asker import asker_of, owner_of
from server.body import read_body
from server.connection import EventStream, while_connected
from server.context import ServerContext
from server.errors import ApiError, TooManyRequests, internal_error
from server.renderers import Renderer
from server.request_group import News, RequestGroup
from server.schema.common import AnswerRequest

log = logging.getLogger(__name__)

Wire = TypeVar("Wire", bound=AnswerRequest)


def json_response(content: Any, status: int = 200) -> Response:
    """A JSON body."""
    return Response(orjson.dumps(content), status, media_type="application/json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked(Generic[Wire]):
    """A request whose body has been read, for an engine that is ready."""

    context: ServerContext
    wire: Wire
    model: str  # the served name that it means
    info: EngineInfo
    owner: str  # whose answers it may see (`server.asker`)


async def respond(request: Request, body_model: type[Wire], prepare: Callable[[Asked[Wire]], Renderer]) -> Response:
    """Answer a request to generate: read its body, `prepare` its renderer in a thread, run it, then stream or fold.

    An error before the first output has its own status; a later one is an event.
    """
    context: ServerContext = request.app.state.context
    wire, lane = await read_body(request, body_model, context)
    context.metrics.ignored_keys.inc(by=wire.num_ignored_keys)
    model = context.model_name(wire.model)
    client, connection = asker_of(request, context.config)
    key = request.state.key
    context.key_limits.check(key, wire.num_answers)
    info = context.ready_info(wire.num_answers, client)
    asked = Asked(context=context, wire=wire, model=model, info=info, owner=owner_of(request))
    renderer = await lane.run(request.receive, prepare, asked)
    requests = [replace(each, client=client, connection=connection) for each in renderer.prepared.requests]
    group = RequestGroup(context.engine, requests)
    if wire.stream:
        return EventStream(partial(_stream, context, renderer, group, key, request.state.request_id))
    return json_response(await while_connected(request.receive, _body(context, renderer, group, key)))


async def _body(context: ServerContext, renderer: Renderer, group: RequestGroup, key: int | None) -> dict[str, Any]:
    async def take(news: News) -> None:
        for index, output in news:
            renderer.take(index, output)

    await _run(context, renderer, group, key, take)
    body = renderer.body()
    await renderer.keep()
    return body


async def _stream(
    context: ServerContext,
    renderer: Renderer,
    group: RequestGroup,
    key: int | None,
    request_id: str,
    stream: EventStream,
) -> None:
    """Write the events of a streamed answer, those of one step together. An error before the first of them raises.

    A later one becomes the last event, since the status has been sent.
    """
    unsent: list[bytes] = []

    async def write(news: News) -> None:
        if not stream.has_begun:
            unsent.extend(event.encode() for event in renderer.begin())
        unsent.extend(data for index, output in news if (data := renderer.stream(index, output)))
        if unsent:
            data = b"".join(unsent)
            unsent.clear()
            await stream.write(data)

    def write_now(index: int, output: EngineOutput) -> bool:
        if output.finish_reason is not None or not stream.can_write_now:
            return False
        if data := renderer.stream(index, output):
            stream.write_now(data)
        if renderer.is_finished(index):
            group.stop(index)
        return True

    if group.num_requests == 1:  # several choices share the write of a step
        group.take_now = write_now
    try:
        await _run(context, renderer, group, key, write)
        last = renderer.end()
        await renderer.keep()
        unsent += [event.encode() for event in last]
        unsent.append(renderer.end_marker)
    except Exception as error:
        if not stream.has_begun and not unsent:
            raise
        unsent += [event.encode() for event in renderer.failure(_shown(error, request_id))]
    await stream.write(b"".join(unsent))


def _shown(error: Exception, request_id: str) -> ApiError:
    """What the client is told about an error."""
    if isinstance(error, ApiError):
        return error
    log.error("request %s failed while streaming", request_id, exc_info=error)
    return internal_error(request_id)


async def _run(
    context: ServerContext,
    renderer: Renderer,
    group: RequestGroup,
    key: int | None,
    use: Callable[[News], Awaitable[None]],
) -> None:
    """Run the answer's requests and `use` their outputs. A request stops as soon as its choice is finished."""
    watch = _Watch(context, renderer)
    limits = context.key_limits.admitted(key, group.num_requests, lambda: renderer.counts.num_tokens)
    with limits, context.gate.admitted(group), group:
        while news := await group.take():
            for _, output in news:
                if output.overloaded:
                    raise context.gate.with_retry_after(TooManyRequests(output.error or "the queue is full"))
            watch.on_output()
            await use(news)
            for index, _ in news:
                if renderer.is_finished(index):
                    group.stop(index)
    watch.on_end()


class _Watch:
    """Metrics of one answer."""

    def __init__(self, context: ServerContext, renderer: Renderer) -> None:
        self._metrics = context.metrics
        self._renderer = renderer
        self._start_s = time.monotonic()
        self._saw_output = False

    def on_output(self) -> None:
        if not self._saw_output:
            self._saw_output = True
            self._metrics.first_token_seconds.observe(self._renderer.model, value=time.monotonic() - self._start_s)

    def on_end(self) -> None:
        metrics, model, counts = self._metrics, self._renderer.model, self._renderer.counts
        metrics.request_seconds.observe(model, value=time.monotonic() - self._start_s)
        metrics.prompt_tokens.inc(model, by=counts.num_prompt)
        metrics.completion_tokens.inc(model, by=counts.num_completion)
        for choice in self._renderer.choices:
            metrics.finished.inc(model, str(choice.finish_reason))
            metrics.undeclared_calls.inc(model, by=choice.num_undeclared_calls)
            if choice.is_empty:
                metrics.empty_answers.inc(model, str(choice.finish_reason))
