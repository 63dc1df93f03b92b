"""From an `Answer` to an HTTP response: runs its requests, streamed or whole, and ends them when the client leaves."""

import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.answer import Answer
from server.connection import while_connected
from server.context import ServerContext
from server.errors import ApiError, body_of, error_body
from server.running import Running
from server.sse import DONE, EventStream, event

log = logging.getLogger(__name__)


def json_response(content: Any, status: int = 200) -> Response:
    """A JSON body."""
    return Response(orjson.dumps(content), status, media_type="application/json")


async def respond(
    request: Request, context: ServerContext, answer: Answer, *, stream: bool, include_usage: bool
) -> Response:
    """Run the answer's requests. An error before the first output has its own status; a later one is an event."""
    if not stream:
        return json_response(await while_connected(request.receive, _whole(context, answer)))
    events = _events(context, answer, include_usage=include_usage)
    first = await while_connected(request.receive, anext(events))
    return EventStream(_guarded(first, events, request.state.request_id))


async def _whole(context: ServerContext, answer: Answer) -> dict[str, Any]:
    watch = _Watch(context, answer)
    with context.gate.admitted():
        async with Running(context.engine, answer.job.requests) as running:
            async for index, output in running:
                watch.on_output()
                answer.absorb(index, output)
                if answer.is_finished(index):
                    running.stop(index)
    watch.on_end()
    return answer.whole()


async def _events(context: ServerContext, answer: Answer, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
    watch = _Watch(context, answer)
    with context.gate.admitted():
        async with Running(context.engine, answer.job.requests) as running:
            async for index, output in running:
                watch.on_output()
                for chunk in answer.chunks(index, output):
                    yield event(chunk)
                if answer.is_finished(index):
                    running.stop(index)
    watch.on_end()
    if include_usage:
        yield event(answer.usage_chunk())
    yield DONE


async def _guarded(first: bytes, events: AsyncGenerator[bytes, None], request_id: str) -> AsyncGenerator[bytes, None]:
    """The events; an error becomes the last of them, since the status has been sent."""
    try:
        yield first
        async for data in events:
            yield data
    except ApiError as error:
        yield event(body_of(error))
    except Exception:
        log.exception("request %s failed while streaming", request_id)
        yield event(
            error_body(f"internal error; the service's log has it under request id {request_id}", ApiError.type)
        )
    finally:
        await events.aclose()


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
            self._metrics.first_token_seconds.labels(self._answer.model).observe(time.monotonic() - self._start_s)

    def on_end(self) -> None:
        metrics, model, usage = self._metrics, self._answer.model, self._answer.usage
        metrics.request_seconds.labels(model).observe(time.monotonic() - self._start_s)
        metrics.prompt_tokens.labels(model).inc(usage["prompt_tokens"])
        metrics.completion_tokens.labels(model).inc(usage["completion_tokens"])
        for choice in self._answer.choices:
            metrics.finished.labels(model, choice.finish_reason).inc()
