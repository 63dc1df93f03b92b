"""`RankedEngineClient`: an `EngineClient` whose engine is many processes, maybe on several hosts. Runs on host 0."""

import asyncio
import socket

import zmq

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.messages import Beat, Failed, FromEngine, bind, new_address
from engine.rank_processes import RANK_MODULE, ParentSockets, RankProcesses
from engine.rank_watch import TICK_S, RankWatch
from engine.rank_worker import PULSE, PULSE_END, PULSE_SETTING

_PULSE_LINGER_MS = 500


class RankedEngineClient(EngineClient):
    """Starts the ranks of this host and watches those of all hosts."""

    def __init__(self, config: EngineConfig, *, worker_module: str = RANK_MODULE) -> None:
        super().__init__(config, worker_module=worker_module)
        self._watch = RankWatch(range(config.num_ranks))
        self._pulse: zmq.Socket[bytes] | None = None

    async def start(self) -> None:
        """Start the processes and return; loading goes on. Watch `ready` and `failure`."""
        addresses = {rank: new_address() for rank in self.config.local_ranks} | {0: self.requests_address}
        outputs_address = self._open(self.requests_address, new_address())
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

    def _handle(self, message: FromEngine) -> None:
        if isinstance(message, Failed):
            self._watch.on_failed(message)
            return
        if isinstance(message, Beat):
            self._watch.on_beat(message)
        was_loaded = self.info is not None
        super()._handle(message)
        if self.info is not None and not was_loaded:
            self._watch.on_loaded()

    async def _watch_ranks(self, processes: RankProcesses) -> None:
        """Until closed or failed. After a failure all ranks end at once, on other hosts too."""
        statuses: list[int] = []

        def on_exit(rank: int, status: int) -> None:
            statuses.append(status)
            self._watch.on_exit(rank, status)

        watching = asyncio.create_task(processes.watch(on_exit))
        while not self._closing and self.failure is None:
            self._read_messages()
            cause = self._watch.tick()
            if cause is not None:
                self.fail(cause.message, is_setting=cause.is_setting)
                break
            self._send_pulse(PULSE)
            await asyncio.sleep(TICK_S)
        if not self._closing:
            await processes.end(told_to_stop=False, at_once=True)
        await watching
        if self._pulse is not None:
            if any(statuses):  # else the ranks on other hosts have agreed to stop, too
                self._send_pulse(PULSE_SETTING if self.has_wrong_setting else PULSE_END)
            self._pulse.close(linger=_PULSE_LINGER_MS)

    def _send_pulse(self, word: bytes) -> None:
        if self._pulse is not None:
            self._pulse.send(word)
