"""`EngineClient`: the HTTP process's side of the engine. Starts its process, streams outputs. No torch, no text."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec
import zmq

from engine.admission import choose_loser
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.fair_queue import Path
from engine.messages import (
    EXIT_FAILED,
    Abort,
    Add,
    Beat,
    FromEngine,
    Outputs,
    Ready,
    Shutdown,
    ToEngine,
    WorkerSetup,
    bind,
    new_address,
)
from engine.process import WorkerProcess, describe_exit
from engine.types import EngineInfo, EngineOutput, EngineRequest, EngineStats
from engine.validate import RequestLimits, check_request, overloaded_output, refusal_output
from loaders.phases import StartProgress

_LAST_WORD_S = 2.0  # how long a message may still be on its way after the process has ended
_LOADING = "the model is still loading; try again later"
_STOPPED = "the engine has stopped; the request cannot be finished"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stream:
    """A request that has not had its last output.

    `path` is its client and connection; `has_begun` is True once any request of that connection has had an output.
    """

    deliver: Callable[[EngineOutput], None]
    path: Path
    has_begun: bool = False
    abort_sent: bool = False


class EngineClient:
    """One engine process, its requests and its health. All methods belong to one event loop.

    Liveness is `alive` and a small `heartbeat_age_s`; readiness is `ready`. Request ids must never be used twice.
    """

    def __init__(self, config: EngineConfig, *, worker_module: str = "engine.worker") -> None:
        """`worker_module` is what the engine process runs."""
        self.config = config
        self.info: EngineInfo | None = None
        self.failure: str | None = None
        self.stats: EngineStats | None = None
        self.start_progress: StartProgress | None = None  # while the engine loads; None until its first message
        self.was_killed = False  # `close` had to kill a process that was ready
        self._worker_module = worker_module
        self._streams: dict[str, _Stream] = {}
        self._limits: RequestLimits | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._process: WorkerProcess | None = None
        self._closing = False
        self._progress_s = time.monotonic()

    async def start(self) -> None:
        """Start the process and return; loading goes on. Watch `ready` and `failure`."""
        loop = asyncio.get_running_loop()
        requests_address, outputs_address = new_address(), new_address()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._outputs = self._context.socket(zmq.PULL)
        self._outputs.set_hwm(0)
        bind(self._outputs, outputs_address)
        self._requests = self._context.socket(zmq.PUSH)
        self._requests.set_hwm(0)
        self._requests.setsockopt(zmq.RECONNECT_IVL, 20)
        self._requests.connect(requests_address)
        loop.add_reader(self._outputs.fileno(), self._read_messages)
        setup = WorkerSetup(
            config=self.config,
            requests_address=requests_address,
            outputs_address=outputs_address,
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        self._progress_s = time.monotonic()
        self._process = await WorkerProcess.start(self._worker_module, setup)
        self._watcher = asyncio.create_task(self._watch(self._process))

    @property
    def ready(self) -> bool:
        """True when requests are served: loaded, not failed, not closing."""
        return self.info is not None and self.alive

    @property
    def alive(self) -> bool:
        """True while the process exists and has not given up."""
        return self._process is not None and self._process.is_running and self.failure is None and not self._closing

    @property
    def pid(self) -> int | None:
        """Id of the engine process, None before the start."""
        return None if self._process is None else self._process.pid

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the step loop's last known iteration; while loading, since the last message of the process.

        A busy loop iterates after every chunk of a prompt, an idle one four times a second. So this grows only if a
        step hangs, or the process is stopped or gone.
        """
        return time.monotonic() - self._progress_s

    def submit(self, request: EngineRequest, deliver: Callable[[EngineOutput], None]) -> None:
        """Start a request. `deliver` gets its outputs as they arrive, the last one with a finish reason.

        A refusal is delivered as the last output, before this returns. `deliver` must not raise.

        Raises:
            ValueError: the request id is in use.
        """
        refusal = self._refuse(request)
        if refusal is not None:
            deliver(refusal)
            return
        self._streams[request.request_id] = _Stream(deliver, (request.client, request.connection))
        self._send(Add(request))

    def drop(self, request_id: str) -> None:
        """End a request without any further output. Does nothing if it is over or unknown."""
        self.abort(request_id)
        self._streams.pop(request_id, None)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Outputs of the request. The last one always has a finish reason.

        Closing the iterator before that output has arrived drops the request.
        """
        outputs: asyncio.Queue[EngineOutput] = asyncio.Queue()
        self.submit(request, outputs.put_nowait)
        is_over = False
        try:
            while not is_over:
                output = await outputs.get()
                is_over = output.finish_reason is not None
                yield output
        finally:
            if not is_over:
                self.drop(request.request_id)

    def abort(self, request_id: str) -> None:
        """End a request early; its stream gets a last output. Does nothing if it is over or unknown."""
        stream = self._streams.get(request_id)
        if stream is not None and not stream.abort_sent:
            stream.abort_sent = True
            self._send(Abort(request_id))

    async def close(self, *, at_once: bool = False) -> None:
        """End the process; requests still running get an error. May be called twice, and without `start`.

        `at_once` kills the process without waiting; use it when the engine is known to hang.
        """
        if self._process is None or self._closing:
            return
        was_ready = self.ready
        self._closing = True
        self._end_streams()
        if was_ready and not at_once:
            self._send(Shutdown())
        self.was_killed = await self._process.end(told_to_stop=was_ready, at_once=at_once) and was_ready
        if self.was_killed:
            logger.error("the engine process did not end by itself and was killed")
        await self._watcher
        asyncio.get_running_loop().remove_reader(self._outputs.fileno())
        self._context.destroy(linger=0)

    def _refuse(self, request: EngineRequest) -> EngineOutput | None:
        """The refusal of a request that cannot go to the engine; None to send it."""
        request_id = request.request_id
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} is in use: ids must be unique")
        if not self.alive or self._limits is None:
            is_loading = self.alive
            return EngineOutput(
                request_id=request_id,
                finish_reason="error",
                error=_LOADING if is_loading else _STOPPED,
                overloaded=is_loading,
            )
        try:
            check_request(request, self._limits)
        except RequestError as error:
            return refusal_output(request_id, error)
        if len(self._streams) >= self.config.max_requests and not self._free_place(request.client):
            return overloaded_output(request_id, self.config.max_requests)
        return None

    def _free_place(self, client: str) -> bool:
        """Take a place from another client's request, if `engine.admission` grants it; that request gets the 429."""
        ids = list(self._streams)
        loser = choose_loser([(stream.path, stream.has_begun) for stream in self._streams.values()], client)
        if loser is None:
            return False
        self.abort(ids[loser])
        stream = self._streams.pop(ids[loser])
        stream.deliver(overloaded_output(ids[loser], self.config.max_requests))
        return True

    def _send(self, message: ToEngine) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the engine is gone: its streams have been ended
            self._requests.send(self._encoder.encode(message), zmq.NOBLOCK)

    def _read_messages(self) -> None:
        """Take everything that has arrived; the descriptor signals again only after that."""
        while self._outputs.getsockopt(zmq.EVENTS) == zmq.POLLIN:
            self._handle(self._decoder.decode(self._outputs.recv(zmq.NOBLOCK)))

    def _handle(self, message: FromEngine) -> None:
        now_s = time.monotonic()
        if isinstance(message, Outputs):
            self._progress_s = now_s
            for output in message.outputs:
                self._deliver(output)
        elif isinstance(message, Beat):
            self._progress_s = max(self._progress_s, now_s - message.loop_age_s)
            self.stats = message.stats or self.stats
            self.start_progress = message.start
        elif isinstance(message, Ready):
            info = message.info
            self._progress_s = now_s
            self.start_progress = None
            self._limits = RequestLimits(
                vocab_size=info.vocab_size,
                max_model_len=info.max_model_len,
                num_kv_tokens=info.num_kv_tokens,
            )
            self.info = info
        else:
            self._fail(message.message)

    def _deliver(self, output: EngineOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is not None:  # else its reader has left
            if not stream.has_begun:
                for each in self._streams.values():
                    each.has_begun = each.has_begun or each.path == stream.path
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream.deliver(output)

    def _fail(self, message: str) -> None:
        if self.failure is None and not self._closing:
            self.failure = message
            if self.info is not None:  # a failure to start is for the one who starts to report
                logger.error("%s", message)
            self._end_streams()

    def _end_streams(self) -> None:
        for request_id in list(self._streams):
            self._deliver(EngineOutput(request_id=request_id, finish_reason="error", error=_STOPPED))

    async def _watch(self, process: WorkerProcess) -> None:
        """Wait for the process to end, then a moment longer for a `Failed` message that is still on its way."""
        status = await process.wait()
        until_s = time.monotonic() + _LAST_WORD_S
        while status == EXIT_FAILED and self.failure is None and not self._closing and time.monotonic() < until_s:
            self._read_messages()
            await asyncio.sleep(0.01)
        self._fail(f"the engine process {describe_exit(status)}; its log says why")
