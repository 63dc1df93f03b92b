"""`respond`: answers a request to generate. Reads, prepares, runs, then streams events or folds them into one body.

When the client leaves, its requests end.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import orjson
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from engine.logs import FIELDS
from engine.types import EngineInfo, EngineOutput
from server.answer_watch import AnswerWatch
from server.asker import asker_of, owner_of
from server.body import read_body
from server.connection import ChunkWriter, EventStream, while_connected
from server.context import ServerContext
from server.deadline import Deadline
from server.errors import ApiError, EngineFailed, TooManyRequests, Unavailable, internal_error
from server.renderers import Renderer
from server.request_group import Engine, News, RequestGroup
from server.schema.common import AnswerRequest

if TYPE_CHECKING:
    from server.tracing import Trace

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
"""A stream says something at least every two such times. Proxies often give up after 60 s."""

Args = ParamSpec("Args")
Result = TypeVar("Result")
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
    trace: Trace | None = request.state.trace
    if trace is not None:
        trace.begin(request.scope["route"].path)
    deadline = Deadline.from_now(request)
    async with deadline.limits_task():
        wire, lane = await read_body(request, body_model, context)
    deadline = deadline.shortened(wire.timeout_s)
    context.metrics.ignored_keys.inc(by=wire.num_ignored_keys)
    model = context.model_name(wire.model)
    client, connection = asker_of(request, context.config)
    key = request.state.key
    context.key_limits.check(key, wire.num_answers)
    info = context.ready_info(wire.num_answers, client)
    asked = Asked(context=context, wire=wire, model=model, info=info, owner=owner_of(request))
    async with deadline.limits_task():
        renderer = await lane.run(request.receive, prepare, asked)
    requests = [replace(each, client=client, connection=connection) for each in renderer.prepared.requests]
    names = (request.state.request_id, renderer.prepared.answer_id)
    group = RequestGroup(context.engine, requests, names=names, owner=asked.owner)
    watch = AnswerWatch(context.metrics, renderer, keeps_tokens=context.request_log.keeps_text)
    renderer.timings = watch.timings
    if trace is not None:
        trace.follow(renderer, watch)
    answer = _Answer(
        context=context, renderer=renderer, group=group, watch=watch, key=key, request_id=request.state.request_id,
        trace=trace, deadline=deadline,
    )  # fmt: skip
    if wire.stream:
        return EventStream(partial(_stream, answer))
    return json_response(await while_connected(request.receive, _body(answer)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """An answer that is about to be made, and what it is made with; `key` is the number of the client's key."""

    context: ServerContext
    renderer: Renderer
    group: RequestGroup
    watch: AnswerWatch
    key: int | None
    request_id: str
    trace: "Trace | None"
    deadline: Deadline

    def timed(self, work: Callable[Args, Result]) -> Callable[Args, Result]:
        """The same function; if the answer is traced, its time is counted."""
        return work if self.trace is None else self.trace.timed(work)


async def _body(answer: _Answer) -> dict[str, Any]:
    renderer, take_output = answer.renderer, answer.timed(answer.renderer.take)

    async def take(news: News) -> None:
        for index, output in news:
            take_output(index, output)

    await _run(answer, take)
    body = answer.timed(renderer.body)()
    await renderer.keep()
    return body


async def _stream(answer: _Answer, stream: EventStream) -> None:
    """Write the events of a streamed answer, those of one step together. An error before the first of them raises.

    A later one becomes the last event, since the status has been sent. A stream that has been silent for a while begins
    even without an output.
    """
    renderer, group = answer.renderer, answer.group
    render = answer.timed(renderer.stream)
    unsent: list[bytes] = []

    async def write(news: News) -> None:
        if not stream.has_begun:
            unsent.extend(event.encode() for event in renderer.begin())
        if news:
            unsent.extend(data for index, output in news if (data := render(index, output)))
        else:
            unsent.append(renderer.keep_alive)
        if unsent:
            data = b"".join(unsent)
            unsent.clear()
            await stream.write(data)
        if news and group.taker is None and group.num_requests == 1 and stream.chunks is not None:
            # Several choices would share the write of a step. The first output, which `on_news` times, comes by here.
            group.taker = _Writer(answer, stream.chunks)

    try:
        await _run(answer, write, keeps_alive=True)
        last = renderer.end()
        await renderer.keep()
        unsent += [event.encode() for event in last]
        unsent.append(renderer.end_marker)
    except Exception as error:
        if not stream.has_begun and not unsent:
            raise
        unsent += [event.encode() for event in renderer.failure(_shown(error, answer.request_id), answer.request_id)]
    await stream.write(b"".join(unsent))


class _Writer:
    """Writes the outputs of the only request of a stream, while `_run` waits for them and the client reads.

    A step of many streams finds nothing of them in the processor's caches, so the time that a token takes is mostly the
    number of objects that it touches.
    """

    __slots__ = ("_chunks", "_group", "_render", "_renderer", "_take_token", "_watch")

    def __init__(self, answer: _Answer, chunks: ChunkWriter) -> None:
        self._chunks = chunks
        self._group = answer.group
        self._watch = answer.watch
        self._renderer = answer.renderer
        self._render = answer.timed(answer.renderer.stream)
        self._take_token = answer.timed(answer.renderer.text_events[0].take_token)

    def take(self, output: EngineOutput) -> bool:
        """Write what an output brings. False, and nothing is done, if the task must do it."""
        if not self._chunks.is_writable or output.finish_reason is not None:
            return False
        self._watch.on_tokens([(0, output)])
        if data := self._render(0, output):
            self._chunks.write_soon(data)
        if self._renderer.is_finished(0):
            self._group.stop(0)
        return True

    def take_token(self, token_id: int, now_s: float) -> bool:
        """The same for a token, in less time if all that it does is to add text."""
        chunks, take_token = self._chunks, self._take_token  # a call of `self._take_token` would look it up anew
        if not chunks.is_writable or (event := take_token(token_id)) is None:
            return False
        self._watch.on_token(token_id, now_s)
        chunks.write_soon(event)
        return True


def _shown(error: Exception, request_id: str) -> ApiError:
    """What the client is told about an error."""
    if isinstance(error, ApiError):
        return error
    log.error(
        "request %s failed while streaming", request_id, exc_info=error, extra={FIELDS: {"request_id": request_id}}
    )
    return internal_error(request_id)


async def _run(answer: _Answer, use: Callable[[News], Awaitable[None]], *, keeps_alive: bool = False) -> None:
    """Run the answer's requests and `use` their outputs. A request stops as soon as its choice is finished.

    With `keeps_alive`, `use` also gets empty news while there are no outputs.
    """
    context, renderer, group, watch = answer.context, answer.renderer, answer.group, answer.watch
    limits = context.key_limits.admitted(answer.key, group.num_requests, lambda: renderer.counts.num_tokens)
    logged = context.request_log.around(answer.request_id, renderer, watch)
    on_time = answer.deadline.limits_group(group)
    with limits, logged, watch, _failing_over(context.engine), context.gate.admitted(group), on_time, group:
        while news := await (_next_news(answer, use) if keeps_alive else group.take()):
            for _, output in news:
                if output.overloaded:
                    raise context.gate.with_retry_after(TooManyRequests(output.error or "the queue is full"))
            watch.on_news(news)
            await use(news)
            for index, _ in news:
                if renderer.is_finished(index):
                    group.stop(index)
    watch.on_end()


async def _next_news(answer: _Answer, use: Callable[[News], Awaitable[None]]) -> News:
    """What `RequestGroup.take` returns; calls `use` with empty news whenever there was no token for `KEEP_ALIVE_S`."""
    while True:
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                return await answer.group.take()
        except TimeoutError:  # tokens that `taker` has dealt with wake nobody
            await asyncio.sleep(0)  # what it took after the time was up is written before what comes next
            if answer.watch.silence_s >= KEEP_ALIVE_S:
                await use([])


@contextmanager
def _failing_over(engine: Engine) -> Iterator[None]:
    """A request that fails because the engine is gone gets a 503: balancers then try it on another replica."""
    try:
        yield
    except EngineFailed as error:
        if engine.failure is None:
            raise
        raise Unavailable(error.message) from error
