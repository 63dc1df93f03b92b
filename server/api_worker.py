"""One of several HTTP processes: the application around an engine that the supervisor has started. Run by it.

It ignores signals, because the supervisor decides when to stop, and ends at once when the supervisor is gone.
"""

import asyncio
import pickle
import signal
import socket
import sys
import threading

import uvloop

from engine.logs import log_to_stderr
from engine.member import EngineMember
from engine.process import exit_with_parent
from engine.stack_dump import forward_on_signal
from server.api_process import ApiSetup
from server.api_server import ApiServer
from server.app import create_app
from server.board import Board, SharedTally, Turn
from server.memory import settle_memory
from server.model_files import read_model_files
from server.service import describe_link
from server.tally import Gauge, Sharing


async def _serve(setup: ApiSetup) -> None:
    num_keys = len(setup.server_config.api_keys)
    num_schedulers = setup.engine_config.data_parallel_size
    board = Board(setup.board_descriptor, setup.num_workers, setup.started_s, num_keys, num_schedulers)
    tally = SharedTally(board, setup.index)
    engine = EngineMember(setup.engine_config, origin=setup.origin, loads=board.loads(setup.index))
    files = read_model_files(setup.engine_config.model)
    app = create_app(
        engine,
        files.tokenizer,
        setup.server_config,
        files.defaults,
        Sharing(
            tally=tally,
            turn=Turn(board),
            num_held_by_client=lambda: engine.num_by_client,
            key_memory=board.key_memory(setup.index),
        ),
    )
    engine.on_freed = app.state.context.gate.on_freed
    engine.on_ready = lambda: tally.set_gauge(Gauge.READY, 1)
    engine.join(setup.requests_address)
    forward_on_signal(lambda: f"HTTP process {setup.index}: {describe_link(engine)}", lambda: ())
    settle_memory()
    with socket.socket(fileno=setup.channel_descriptor) as channel:
        server = ApiServer(app, setup.server_config, channel=channel, tally=tally, on_engine_failure=engine.fail)
        await server.serve()
    engine.close()


def main() -> None:
    """Entry of the process."""
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    setup: ApiSetup = pickle.load(sys.stdin.buffer)
    threading.Thread(target=exit_with_parent, name="parent-watch", daemon=True).start()
    log_to_stderr(setup.server_config.log_level, setup.engine_config.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(setup))


if __name__ == "__main__":
    main()
