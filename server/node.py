"""Life of a host that serves no HTTP: it runs its ranks of an engine whose host 0 does the rest.

Exit statuses: 0 if its ranks ended because host 0 ended, or after a signal; 1 if one failed or host 0 was lost.
SettingError, and so 2, if the engine cannot start before a setting or the model's files are changed.
"""

import asyncio
import logging
import signal
import sys

from engine.config import EngineConfig
from engine.messages import EXIT_FAILED, EXIT_SETTING, new_address
from engine.process import describe_exit
from engine.rank_processes import RANK_MODULE, ParentSockets, RankProcesses
from engine.rank_worker import EXIT_LOST
from engine.stack_dump import forward_on_signal
from server import streams
from server.errors import SettingError

log = logging.getLogger(__name__)

_GRACE_S = 10.0  # after host 0 has drained


def run_node(config: EngineConfig, drain_timeout_s: float, *, worker_module: str = RANK_MODULE) -> int:
    """Run the ranks of this host until host 0 ends them; returns the exit status. Raises SettingError."""
    return asyncio.run(_run(config, drain_timeout_s, worker_module))


async def _run(config: EngineConfig, drain_timeout_s: float, worker_module: str) -> int:
    """After a first signal the ranks go on until host 0, which has got one too, has drained; a second ends them. Ranks
    that have not met host 0 yet end at once: SIGTERM kills them, and is ignored from then on.
    """
    addresses = {rank: new_address() for rank in config.local_ranks}
    ranks = await RankProcesses.start(worker_module, config, addresses, ParentSockets())
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(sig) != signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(sig, signals.put_nowait, sig)
    forward_on_signal(lambda: f"host {config.node_rank}", lambda: list(ranks.pids.values()))
    exits: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    watching = asyncio.create_task(ranks.watch(lambda rank, status: exits.put_nowait((rank, status))))
    streams.write(sys.stdout, f"moe-serve: host {config.node_rank} of {config.nnodes} runs ranks {_span(config)}\n")
    try:
        return await _wait(ranks, exits, signals, drain_timeout_s + _GRACE_S)
    finally:
        await ranks.end(told_to_stop=False, at_once=True)
        await watching


async def _wait(
    ranks: RankProcesses,
    exits: "asyncio.Queue[tuple[int, int]]",
    signals: "asyncio.Queue[signal.Signals]",
    grace_s: float,
) -> int:
    """Until all ranks have ended well, one has not, or signals say so. Returns the exit status; raises SettingError."""
    num_running, timeout_s = len(ranks.pids), None
    getting = asyncio.ensure_future(signals.get())
    while num_running:
        ending = asyncio.ensure_future(exits.get())
        done, _ = await asyncio.wait({ending, getting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if ending in done:
            rank, status = ending.result()
            num_running -= 1
            if status == -signal.SIGTERM and timeout_s is not None:
                return 0
            if status != 0:
                if status == EXIT_SETTING:
                    raise SettingError("the engine cannot start: host 0 says why")
                if status == EXIT_LOST:
                    log.error("host 0 has failed, or cannot be reached any more")
                elif status != EXIT_FAILED:  # else its log, and host 0, say why
                    log.error("the process of rank %d %s", rank, describe_exit(status))
                return 1
            continue
        ending.cancel()
        if getting not in done or timeout_s is not None:
            return 0
        log.info("%s: this host ends when host 0 has drained, or now if it has not met it", getting.result().name)
        ranks.send_signal(signal.SIGTERM)
        timeout_s = grace_s
        getting = asyncio.ensure_future(signals.get())
    getting.cancel()
    return 0


def _span(config: EngineConfig) -> str:
    ranks = config.local_ranks
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start} to {ranks.stop - 1}"
