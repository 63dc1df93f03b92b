"""`respond`: runs the engine requests of an answer and sends it as one body or as a stream of events.

When the client leaves, its requests end.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from engine.types import EngineOutput
from server.answer import Answer
from server.asker import asker_of
from server.connection import while_connected
from server.context import ServerContext
from server.errors import ApiError, TooManyRequests, body_of, internal_error
from server.request_group import News, RequestGroup
from server.schema.common import StreamOptions
from server.sse import DONE, EventStream, event

log = logging.getLogger(__name__)


def json_response(content: Any, status: int = 200) -> Response:
    """A JSON body."""
    return Response(orjson.dumps(content), status, media_type="application/json")


async def respond(
    request: Request, context: ServerContext, answer: Answer, *, stream: bool | None, options: StreamOptions | None
) -> Response:
    """Run the answer's requests. An error before the first output has its own status; a later one is an event."""
    client, connection = asker_of(request, context.config)
    requests = [replace(each, client=client, connection=connection) for each in answer.prepared.requests]
    group = RequestGroup(context.engine, requests)
    if stream:
        produce = partial(_stream, context, answer, group, options or StreamOptions(), request.state.request_id)
        return EventStream(produce)
    return json_response(await while_connected(request.receive, _body(context, answer, group)))


async def _body(context: ServerContext, answer: Answer, group: RequestGroup) -> dict[str, Any]:
    async def feed(news: News) -> None:
        for index, output in news:
            answer.feed(index, output)

    await _run(context, answer, group, feed)
    return answer.body()


async def _stream(
    context: ServerContext,
    answer: Answer,
    group: RequestGroup,
    options: StreamOptions,
    request_id: str,
    stream: EventStream,
) -> None:
    """Write the events of a streamed answer, those of one step together. An error before the first of them raises.

    A later one becomes the last event, since the status has been sent.
    """
    with_usage = bool(options.continuous_usage_stats)
    events: list[bytes] = []

    async def write(news: News) -> None:
        for index, output in news:
            events.extend(answer.events(index, output, with_usage=with_usage))
        if events:
            data = b"".join(events)
            events.clear()
            await stream.write(data)

    def write_now(index: int, output: EngineOutput) -> bool:
        if output.finish_reason is not None or not stream.can_write_now:
            return False
        new_events = answer.events(index, output, with_usage=with_usage)
        if new_events:
            stream.write_now(b"".join(new_events))
        if answer.is_finished(index):
            group.stop(index)
        return True

    if group.num_requests == 1:  # several choices share the write of a step
        group.take_now = write_now
    try:
        await _run(context, answer, group, write)
        if options.include_usage:
            events.append(event(answer.usage_chunk()))
        events.append(DONE)
    except Exception as error:
        if not stream.has_begun and not events:
            raise
        events.append(_error_event(error, request_id))
    await stream.write(b"".join(events))


def _error_event(error: Exception, request_id: str) -> bytes:
    if not isinstance(error, ApiError):
        log.error("request %s failed while streaming", request_id, exc_info=error)
        error = internal_error(request_id)
    return event(body_of(error))


async def _run(
    context: ServerContext, answer: Answer, group: RequestGroup, use: Callable[[News], Awaitable[None]]
) -> None:
    """Run the answer's requests and `use` their outputs. A request stops as soon as its choice is finished."""
    watch = _Watch(context, answer)
    with context.gate.admitted(group), group:
        while news := await group.take():
            for _, output in news:
                if output.overloaded:
                    raise context.gate.with_retry_after(TooManyRequests(output.error or "the queue is full"))
            watch.on_output()
            await use(news)
            for index, _ in news:
                if answer.is_finished(index):
                    group.stop(index)
    watch.on_end()


class _Watch:
    """Metrics of one answer."""

    def __init__(self, context: ServerContext, answer: Answer) -> None:
        self._metrics = context.metrics
        self._answer = answer
        self._start_s = time.monotonic()
        self._saw_output = False

    def on_output(self) -> None:
        if not self._saw_output:
            self._saw_output = True
            self._metrics.first_token_seconds.observe(self._answer.model, value=time.monotonic() - self._start_s)

    def on_end(self) -> None:
        metrics, model, usage = self._metrics, self._answer.model, self._answer.usage
        metrics.request_seconds.observe(model, value=time.monotonic() - self._start_s)
        metrics.prompt_tokens.inc(model, by=usage["prompt_tokens"])
        metrics.completion_tokens.inc(model, by=usage["completion_tokens"])
        for choice in self._answer.choices:
            metrics.finished.inc(model, str(choice.finish_reason))
            metrics.undeclared_calls.inc(model, by=choice.num_undeclared_calls)
            if choice.is_empty:
                metrics.empty_answers.inc(model, str(choice.finish_reason))
