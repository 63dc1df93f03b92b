"""`RankedEngineClient`: an `EngineClient` whose engine is many processes, maybe on several hosts. Runs on host 0."""

import asyncio
import contextlib
import socket
import time

import msgspec
import zmq

from engine.admission import Places
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.messages import Abort, Add, Beat, Failed, FromEngine, Outputs, Ready, ToEngine, bind, new_address
from engine.rank_processes import RANK_MODULE, ParentSockets, RankProcesses
from engine.rank_watch import TICK_S, RankWatch
from engine.rank_worker import PULSE, PULSE_END
from engine.router import Router
from engine.types import EngineInfo

_PULSE_LINGER_MS = 500


class RankedEngineClient(EngineClient):
    """Starts the ranks of this host, watches those of all hosts, and sends each request to a rank that schedules."""

    def __init__(self, config: EngineConfig, *, worker_module: str = RANK_MODULE) -> None:
        super().__init__(config, worker_module=worker_module)
        self._leaders = range(0, config.num_ranks, config.tensor_parallel_size)
        self._num_schedulers = len(self._leaders)
        self._places = Places(config.max_requests * len(self._leaders))
        self._router = Router(len(self._leaders), config.max_requests)
        self._watch = RankWatch(range(config.num_ranks))
        self._infos: dict[int, EngineInfo] = {}
        self._senders: dict[int, zmq.Socket[bytes]] = {}  # by leader
        self._pulse: zmq.Socket[bytes] | None = None

    async def start(self) -> None:
        """Start the processes and return; loading goes on. Watch `ready` and `failure`."""
        addresses = {rank: new_address() for rank in self.config.local_ranks} | {0: self.requests_address}
        outputs_address = self._open(self.requests_address)
        self._senders[0] = self._requests
        for rank in set(self._leaders) & set(addresses) - {0}:
            self._connect(rank, addresses[rank])
        sockets = ParentSockets(outputs=outputs_address)
        if self.config.nnodes > 1:
            try:
                sockets = self._listen_to_far_ranks(outputs_address)
            except (OSError, zmq.ZMQError) as error:
                self.fail(f"master_addr is {self.config.master_addr!r}: this host cannot listen there: {error}")
                self._close()
                return
        self._process = processes = await RankProcesses.start(self._worker_module, self.config, addresses, sockets)
        self._watcher = asyncio.create_task(self._watch_ranks(processes))

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks on this host."""
        return self._process.pids if isinstance(self._process, RankProcesses) else {}

    @property
    def process_ids(self) -> list[int]:
        """Ids of the ranks' processes on this host."""
        return list(self.pids.values())

    def _listen_to_far_ranks(self, outputs_address: str) -> ParentSockets:
        host = socket.gethostbyname(self.config.master_addr or "")
        self._pulse = self._context.socket(zmq.PUB)
        return ParentSockets(
            outputs=outputs_address,
            far_outputs=bind(self._outputs, f"tcp://{host}:*"),
            pulse=bind(self._pulse, f"tcp://{host}:*"),
        )

    def _connect(self, leader: int, address: str) -> None:
        sender = self._context.socket(zmq.PUSH)
        sender.set_hwm(0)
        sender.setsockopt(zmq.RECONNECT_IVL, 20)
        sender.connect(address)
        self._senders[leader] = sender

    def _send(self, message: ToEngine) -> None:
        """A request and its end go to one scheduling rank, anything else to all."""
        if isinstance(message, Add):
            leaders = [self._leaders[self._router.choose(message.request)]]
        elif isinstance(message, Abort):
            scheduler = self._router.find(message.request_id)
            leaders = [] if scheduler is None else [self._leaders[scheduler]]
        else:
            leaders = list(self._senders)
        with contextlib.suppress(zmq.ZMQError):  # the engine is gone: its streams have been ended
            for leader in leaders:
                self._senders[leader].send(msgspec.msgpack.encode(message), zmq.NOBLOCK)

    def _forget(self, request_id: str) -> None:
        super()._forget(request_id)
        self._router.on_end(request_id)

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            for request_id in self._id_decoder.decode(message.token_requests):
                self._router.on_tokens(request_id, 1)
            for output in message.outputs:
                self._router.on_tokens(output.request_id, len(output.token_ids))
            super()._handle(message)
            for output in message.outputs:
                if output.finish_reason is not None:  # its reader may have left before
                    self._router.on_end(output.request_id)
        elif isinstance(message, Beat):
            self._watch.on_beat(message)
            self._progress_s = time.monotonic() - self._watch.loop_age_s
            self.stats = self._watch.stats()
            self.expert_load = message.expert_load or self.expert_load
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, Failed):
            self._watch.on_failed(message)
        else:
            super()._handle(message)

    def _on_ready(self, ready: Ready) -> None:
        """Serve once all ranks are ready, within the limits of the smallest."""
        self._infos[ready.rank] = ready.info
        if ready.requests_address is not None and ready.rank in self._leaders:
            self._connect(ready.rank, ready.requests_address)
        if len(self._infos) < self.config.num_ranks:
            return
        infos = self._infos.values()
        info = msgspec.structs.replace(
            self._infos[0],
            max_model_len=min(info.max_model_len for info in infos),
            num_pages=min(info.num_pages for info in infos),
            max_requests=self.config.max_requests * len(self._leaders),
            device=f"{len(infos)} ranks ({self._infos[0].device})",
        )
        self._watch.on_loaded()
        super()._handle(Ready(info))

    async def _watch_ranks(self, processes: RankProcesses) -> None:
        """Until closed or failed. After a failure all ranks end at once, on other hosts too."""
        statuses: list[int] = []

        def on_exit(rank: int, status: int) -> None:
            statuses.append(status)
            self._watch.on_exit(rank, status)

        watching = asyncio.create_task(processes.watch(on_exit))
        while not self._closing and self.failure is None:
            self._read_messages()
            reason = self._watch.tick()
            if reason is not None:
                self.fail(reason)
                break
            self._send_pulse(PULSE)
            await asyncio.sleep(TICK_S)
        if not self._closing:
            await processes.end(told_to_stop=False, at_once=True)
        await watching
        if self._pulse is not None:
            if any(statuses):  # else the ranks on other hosts have agreed to stop, too
                self._send_pulse(PULSE_END)
            self._pulse.close(linger=_PULSE_LINGER_MS)

    def _send_pulse(self, word: bytes) -> None:
        if self._pulse is not None:
            self._pulse.send(word)
