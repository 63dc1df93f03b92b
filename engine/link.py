"""`EngineLink`: requests to the engine and streams of their outputs, in an HTTP process. No torch, no text, no process.

The engine may be several ranks, some of which schedule: this hides it.
`engine.client.EngineClient` is the link of the process that starts the engine, `engine.member.EngineMember` that of a
process that joins an engine which another one has started.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass

import msgspec
import zmq

from engine.admission import NoPlaceError, Places
from engine.config import EngineConfig
from engine.errors import OrderError, RequestError
from engine.inlet import Inlet
from engine.loads import Loads
from engine.messages import (
    FOUNDER,
    Abort,
    Add,
    Beat,
    FromEngine,
    Held,
    Obeyed,
    Order,
    Outputs,
    Ready,
    ToEngine,
    bind,
)
from engine.rank_reports import RankReports
from engine.senders import Senders, make_router
from engine.types import CallOff, EngineInfo, EngineOutput, EngineRequest, EngineStats, ExpertLoad, OrderKind
from engine.validate import RequestLimits, check_request, overloaded_output, refusal_output
from loaders.phases import StartProgress

_LOADING = "the model is still loading; try again later"
_STOPPED = "the engine has stopped; the request cannot be finished"

logger = logging.getLogger("engine.client")


@dataclass(slots=True)
class _LastStep:
    """Requests that got one token each in the last step of a rank: as sent, their ids, and where their tokens go."""

    token_requests: bytes
    names: list[str]
    inlets: list[Inlet | None]


@dataclass(slots=True)
class _OpenOrder:
    """An order that not all schedulers have answered."""

    num_missing: int
    error: str | None
    is_over: asyncio.Future[None]


class EngineLink:
    """Requests, their outputs and the engine's health. All methods belong to one event loop.

    Liveness is `alive` and a small `heartbeat_age_s`; readiness is `ready`. Request ids must never be used twice.
    """

    def __init__(
        self,
        config: EngineConfig,
        ranks: Collection[int],
        *,
        origin: int = FOUNDER,
        places: Places | None = None,
        loads: Loads | None = None,
    ) -> None:
        """`ranks` are those that tell this process how they are, all that schedule among them. `places` are those of
        the requests sent from here; None if the ranks keep them. `loads` is shared with other HTTP processes, if any.
        """
        self.config = config
        self.info: EngineInfo | None = None
        self.failure: str | None = None
        self.has_wrong_setting = False  # the failure stays until a setting or the model's files are changed
        self.stats: EngineStats | None = None
        self.expert_load: ExpertLoad | None = None
        self.start_progress: StartProgress | None = None  # while the engine loads; None until its first message
        self._origin = origin
        self._places = places
        self._inlets: dict[str, Inlet] = {}  # of the requests that have not had their last output
        self._last_steps: dict[int, _LastStep] = {}  # by rank
        self._reports = RankReports(config, ranks)
        self._router = make_router(config, loads)
        self._orders: dict[int, _OpenOrder] = {}
        self._num_orders = 0
        self._call_off_hooks: list[Callable[[CallOff], None]] = []
        self._limits: RequestLimits | None = None
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._id_decoder = msgspec.msgpack.Decoder(list[str])
        self._is_open = False
        self._closing = False
        self._progress_s = time.monotonic()

    @property
    def ready(self) -> bool:
        """True when requests are served: loaded, not failed, not closing."""
        return self.info is not None and self.alive

    @property
    def alive(self) -> bool:
        """True while the engine, as far as is known, exists and has not given up."""
        return self._is_open and self.failure is None and not self._closing

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the step loop's last known iteration; while loading, since the last message of the process.

        A busy loop iterates after every chunk of a prompt, an idle one four times a second. So this grows only if a
        step hangs, or the process is stopped or gone.
        """
        return time.monotonic() - self._progress_s

    def submit(self, request: EngineRequest, inlet: Inlet) -> None:
        """Start a request. Its outputs are put into `inlet` as they arrive, the last one with a finish reason.

        A refusal is put in as the last output, before this returns unless the engine process keeps the places.

        Raises:
            ValueError: the request id is in use.
        """
        refusal = self._refuse(request)
        if refusal is not None:
            inlet.put(refusal)
            return
        self._inlets[request.request_id] = inlet
        self._send(Add(request, self._origin))

    def drop(self, request_id: str) -> None:
        """End a request without any further output. Does nothing if it is over or unknown."""
        self.abort(request_id)
        self._forget(request_id)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Outputs of the request. The last one always has a finish reason.

        Closing the iterator before that output has arrived drops the request.
        """
        outputs: asyncio.Queue[EngineOutput] = asyncio.Queue()
        self.submit(request, Inlet(outputs.put_nowait))
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
        inlet = self._inlets.get(request_id)
        if inlet is not None and not inlet.abort_sent:
            inlet.abort_sent = True
            self._send(Abort(request_id))

    def call_off(self, call: CallOff) -> None:
        """Have every process that listens end these requests, this one too."""
        self._send(call)

    def on_call_off(self, hook: Callable[[CallOff], None]) -> None:
        """From now on `hook` hears what any process calls off."""
        self._call_off_hooks.append(hook)

    async def order(self, kind: OrderKind) -> None:
        """Have the engine do something other than answering, at every rank that schedules.

        Raises:
            OrderError: a rank cannot, or the engine is gone; the message says why.
        """
        if not self.ready:
            raise OrderError(_STOPPED if self.info is not None else _LOADING)
        self._num_orders += 1
        number = self._num_orders
        order = _OpenOrder(self.config.data_parallel_size, None, asyncio.get_running_loop().create_future())
        self._orders[number] = order
        self._send(Order(kind, number, self._origin))
        try:
            await order.is_over
        finally:
            del self._orders[number]
        if order.error is not None:
            raise OrderError(order.error)

    def fail(self, message: str, *, is_setting: bool = False) -> None:
        """The engine is gone: end all requests with an error. Only the first call counts.

        `is_setting` as in `Failed`.
        """
        if self.failure is None and not self._closing:
            self.failure, self.has_wrong_setting = message, is_setting
            self._end_streams()

    def _open(self, requests_address: str, outputs_address: str) -> str:
        """Open the sockets to the first scheduler and for outputs; returns the address of the latter."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._outputs = self._context.socket(zmq.PULL)
        self._outputs.set_hwm(0)
        bound_address = bind(self._outputs, outputs_address)
        self._senders = Senders(self._context, self._router)
        self._senders.connect(0, requests_address)
        asyncio.get_running_loop().add_reader(self._outputs.fileno(), self._read_messages)
        self._is_open = True
        self._progress_s = time.monotonic()
        return bound_address

    def _close(self) -> None:
        """Close the sockets."""
        asyncio.get_running_loop().remove_reader(self._outputs.fileno())
        self._context.destroy(linger=0)
        self._is_open = False

    def _refuse(self, request: EngineRequest) -> EngineOutput | None:
        """The refusal of a request that cannot go to the engine; None to send it."""
        request_id = request.request_id
        if request_id in self._inlets:
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
        return None if self._places is None else self._take_place(self._places, request)

    def _take_place(self, places: Places, request: EngineRequest) -> EngineOutput | None:
        """Take a place, maybe that of another client's request, which gets the 429; else returns the refusal."""
        try:
            loser = places.take(request.request_id, (request.client, request.connection))
        except NoPlaceError:
            return overloaded_output(request.request_id, places.num_places)
        if loser is not None:
            inlet = self._inlets[loser]
            self.drop(loser)  # the router must know that its scheduler has a place free
            inlet.put(overloaded_output(loser, places.num_places))
        return None

    def _send(self, message: ToEngine) -> None:
        self._senders.send(message)

    def _read_messages(self) -> None:
        """Take everything that has arrived; the descriptor signals again only after that."""
        while self._outputs.getsockopt(zmq.EVENTS) == zmq.POLLIN:
            self._handle(self._decoder.decode(self._outputs.recv(zmq.NOBLOCK)))

    def _handle(self, message: FromEngine) -> None:
        now_s = time.monotonic()
        if isinstance(message, Outputs):
            self._progress_s = now_s
            step = self._read_step(message)
            self._router.on_outputs(self._scheduler_of(message.rank), step.names, message.outputs)
            self._deliver_tokens(step, message.token_ids, now_s)
            for output in message.outputs:
                self._deliver(output)
        elif isinstance(message, Beat):
            self._reports.on_beat(message)
            self._serve_if_ready()
            self._progress_s = max(self._progress_s, now_s - self._reports.loop_age_s)
            self.stats = self._reports.stats()
            self.expert_load = self._reports.expert_load
            if message.rank == 0:
                self.start_progress = message.start
        elif isinstance(message, Held):
            self._note_held(message)
        elif isinstance(message, CallOff):
            for hook in self._call_off_hooks:
                hook(message)
        elif isinstance(message, Obeyed):
            self._note_obeyed(message)
        elif isinstance(message, Ready):
            self._progress_s = now_s
            self._note_ready(message)
        else:
            self.fail(message.message, is_setting=message.is_setting)

    def _scheduler_of(self, rank: int) -> int:
        return rank // self.config.tensor_parallel_size

    def _note_ready(self, ready: Ready) -> None:
        """Connect to a rank, if it schedules."""
        if ready.requests_address is not None:
            self._senders.connect(self._scheduler_of(ready.rank), ready.requests_address)
        self._reports.on_ready(ready)
        self._serve_if_ready()

    def _serve_if_ready(self) -> None:
        """Take requests once all ranks are ready."""
        info = self._reports.info() if self.info is None else None
        if info is None:
            return
        self.start_progress = None
        self._limits = RequestLimits(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            num_kv_tokens=info.num_kv_tokens // self.config.data_parallel_size,
            max_grammar_bytes=self.config.max_grammar_bytes,
        )
        self.info = info

    def _note_obeyed(self, obeyed: Obeyed) -> None:
        order = self._orders.get(obeyed.number)
        if order is None:
            return
        order.error = order.error or obeyed.error
        order.num_missing -= 1
        if order.num_missing == 0 and not order.is_over.done():
            order.is_over.set_result(None)

    def _note_held(self, held: Held) -> None:
        """Only a process that has joined is told, see `engine.member`."""

    def _read_step(self, message: Outputs) -> _LastStep:
        step = self._last_steps.get(message.rank)
        if step is None or step.token_requests != message.token_requests:
            names = self._id_decoder.decode(message.token_requests)
            step = _LastStep(message.token_requests, names, list(map(self._inlets.get, names)))
            self._last_steps[message.rank] = step
        return step

    def _deliver_tokens(self, step: _LastStep, token_ids: list[int], now_s: float) -> None:
        for request_id, inlet, token_id in zip(step.names, step.inlets, token_ids, strict=True):
            if inlet is None:  # its reader has left
                continue
            if inlet.has_begun:
                inlet.put_token(request_id, token_id, now_s)
            else:
                self._deliver(EngineOutput(request_id=request_id, token_ids=[token_id]))

    def _deliver(self, output: EngineOutput) -> None:
        inlet = self._inlets.get(output.request_id)
        if inlet is not None:
            if not inlet.has_begun:
                inlet.has_begun = True
                if self._places is not None:
                    self._places.on_output(output.request_id)
            if output.finish_reason is not None:
                self._forget(output.request_id)
            inlet.put(output)

    def _forget(self, request_id: str) -> None:
        self._inlets.pop(request_id, None)
        self._last_steps.clear()
        self._router.on_end(request_id)
        if self._places is not None:
            self._places.free(request_id)

    def _end_streams(self) -> None:
        for number, order in self._orders.items():
            order.num_missing = 1
            self._note_obeyed(Obeyed(number, _STOPPED))
        for request_id in list(self._inlets):
            self._deliver(EngineOutput(request_id=request_id, finish_reason="error", error=_STOPPED))
