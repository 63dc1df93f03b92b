"""Several HTTP processes of one service, each in a thread of the test's process, around one engine object.

Acceptor, channel, board and server are the real ones. Only the lock around large bodies is one for threads.
"""

import asyncio
import threading
from collections import Counter

from server.api_process import EXIT, ApiProcess
from server.api_server import ApiServer
from server.app import create_app
from server.board import Board, SharedTally
from server.connections import Acceptor
from server.listener import bind, url_of
from server.tally import Sharing


class ApiThreads:
    """`with ApiThreads(...) as threads:` serves at `threads.url`."""

    def __init__(self, engine, tokenizer, config, num_workers):
        self.listener = bind("127.0.0.1", 0)
        self.url = url_of(self.listener)
        self._engine = engine
        self._are_serving = threading.Event()
        board = Board.create(num_workers, config.served_model_name, len(config.api_keys))
        turn = threading.Lock()
        self._processes = [ApiProcess(index, index + 1, board) for index in range(num_workers)]
        self.servers, self.apps = [], []
        for process in self._processes:
            tally = SharedTally(board, process.index)
            sharing = Sharing(
                tally=tally,
                turn=turn,
                num_held_by_client=self._num_held_by_client,
                key_memory=board.key_memory(process.index),
            )
            app = create_app(engine, tokenizer, config, sharing=sharing)
            self.apps.append(app)
            channel = process.channel.other_end
            self.servers.append(ApiServer(app, config, channel=channel, tally=tally, on_engine_failure=None))
        self._threads = [
            threading.Thread(target=lambda each=each: asyncio.run(each.serve()), daemon=True) for each in self.servers
        ]
        self._threads.append(threading.Thread(target=lambda: asyncio.run(self._accept()), daemon=True))

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        assert self._are_serving.wait(10)
        return self

    def __exit__(self, *_exc):
        self._loop.call_soon_threadsafe(self._ended.set)
        self.join(20)

    def is_alive(self):
        return any(thread.is_alive() for thread in self._threads)

    def join(self, timeout_s):
        for thread in self._threads:
            thread.join(timeout_s)

    async def _accept(self):
        """The supervisor's part."""
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        acceptor = Acceptor(self.listener)

        def set_receivers():
            acceptor.set_receivers([process for process in self._processes if process.is_serving])
            if all(process.is_serving for process in self._processes):
                self._are_serving.set()

        for process in self._processes:
            process.on_serving = set_receivers
            process.channel.open()
        await self._ended.wait()
        acceptor.close()
        for process in self._processes:
            process.channel.send(EXIT)
        await asyncio.to_thread(lambda: [thread.join(10) for thread in self._threads[:-1]])
        for process in self._processes:
            process.channel.close()

    def _num_held_by_client(self):
        """The scripted engine runs whatever it is sent."""
        running = set(self._engine.running)
        return Counter(request.client for request in list(self._engine.requests) if request.request_id in running)
