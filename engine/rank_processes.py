"""The processes of the ranks on one host: started and ended together. Knows nothing of requests."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.messages import RankSetup, WorkerSetup
from engine.process import WorkerProcess

RANK_MODULE = "engine.rank_worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParentSockets:
    """Addresses of the HTTP process's sockets: for outputs from ranks of this host and from those of other hosts, and
    of the pulse. Empty on hosts other than 0, whose ranks find them where the ranks meet.
    """

    outputs: str = ""
    far_outputs: str = ""
    pulse: str = ""


class RankProcesses:
    """One process for each rank of this host."""

    def __init__(self, processes: Mapping[int, WorkerProcess]) -> None:
        self._processes = processes

    @classmethod
    async def start(
        cls, module: str, config: EngineConfig, requests_addresses: Mapping[int, str], sockets: ParentSockets
    ) -> "RankProcesses":
        """Run `module` once for each rank, which takes requests at its address. With one host the ranks meet at a free
        port that is bound here.
        """
        host, port = config.master_addr or "", config.master_port
        listener = socket.create_server(("127.0.0.1", 0)) if config.nnodes == 1 else None
        if listener is not None:
            host, port = listener.getsockname()
        processes = {}
        with listener or contextlib.nullcontext():
            for rank, address in requests_addresses.items():
                fds = [listener.fileno()] if listener is not None and rank == 0 else []
                place = RankSetup(
                    rank=rank,
                    store_host=host,
                    store_port=port,
                    store_fd=fds[0] if fds else None,
                    outputs_address=sockets.far_outputs,
                    pulse_address=sockets.pulse,
                )
                setup = WorkerSetup(
                    config=config,
                    requests_address=address,
                    outputs_address=sockets.outputs,
                    log_level=logging.getLogger().getEffectiveLevel(),
                    place=place,
                )
                processes[rank] = await WorkerProcess.start(module, setup, fds)
        return cls(processes)

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    @property
    def pid(self) -> int:
        """Process id of the first one."""
        return next(iter(self.pids.values()))

    @property
    def is_running(self) -> bool:
        """True until one has ended."""
        return all(process.is_running for process in self._processes.values())

    async def watch(self, on_exit: Callable[[int, int], None]) -> None:
        """Tell `on_exit` rank and status of each process that ends; returns when all have ended."""

        async def wait(rank: int, process: WorkerProcess) -> None:
            on_exit(rank, await process.wait())

        await asyncio.gather(*(wait(rank, process) for rank, process in self._processes.items()))

    def send_signal(self, number: int) -> None:
        """Send a signal to all that run."""
        for process in self._processes.values():
            process.send_signal(number)

    async def end(self, *, told_to_stop: bool, at_once: bool = False) -> bool:
        """End all of them as `WorkerProcess.end` does. Returns True if one had to be killed."""
        ends = (each.end(told_to_stop=told_to_stop, at_once=at_once) for each in self._processes.values())
        return any(await asyncio.gather(*ends))
