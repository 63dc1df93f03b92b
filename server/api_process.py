"""`ApiProcess`: the supervisor's view of one HTTP process, which gets connections and orders and sends reports."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.process import WorkerProcess
from server.board import Board
from server.config import ServerConfig
from server.tally import Gauge

CONNECTION, DRAIN, CUT, EXIT, FAILED = b"connection", b"drain", b"cut", b"exit", b"failed "
"""Orders: serve this; take no new work and say when idle; end running requests; stop; the engine is gone (and why)."""

SERVING, IDLE = b"serving", b"idle"
"""Reports: connections can be served; no request is left since `DRAIN`."""

MAX_PACKET_BYTES = 64 * 1024

_MODULE = "server.api_worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiSetup:
    """What an HTTP process reads from its standard input at start, pickled. It inherits the descriptors."""

    server_config: ServerConfig
    engine_config: EngineConfig
    requests_address: str  # of the engine, or its first rank
    origin: int  # what the engine knows the process by
    index: int  # its slot on the board, from 0
    num_workers: int
    board_descriptor: int
    channel_descriptor: int
    started_s: float


class Channel:
    """The supervisor's end of the socket to one HTTP process. Packets keep their order and never block."""

    def __init__(self, on_report: Callable[[bytes], None]) -> None:
        self.socket, self.other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self._on_report = on_report
        self._unsent: deque[bytes] = deque()

    def open(self) -> None:
        """Listen for reports, in the running event loop."""
        asyncio.get_running_loop().add_reader(self.socket.fileno(), self._read)

    def close(self) -> None:
        """Close both ends here."""
        asyncio.get_running_loop().remove_reader(self.socket.fileno())
        self.socket.close()
        self.other_end.close()

    def send(self, order: bytes) -> None:
        """Give an order. If the process reads too slowly, `flush` sends it later."""
        self._unsent.append(order[:MAX_PACKET_BYTES])
        self.flush()

    def flush(self) -> None:
        """Send what could not be sent before."""
        with suppress(BlockingIOError):
            while self._unsent:
                with suppress(BrokenPipeError, ConnectionResetError):  # the process has ended
                    self.socket.send(self._unsent[0])
                self._unsent.popleft()

    def hand_over(self, connection: socket.socket) -> bool:
        """Give the process a client's connection, which stays open here too. False if it takes none now."""
        if self._unsent:
            return False
        try:
            socket.send_fds(self.socket, [CONNECTION], [connection.fileno()])
        except OSError:
            return False
        return True

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while True:
                try:
                    report = self.socket.recv(MAX_PACKET_BYTES)
                except ConnectionResetError:
                    report = b""
                if not report:  # the process has ended, which `ApiProcess.wait` tells
                    asyncio.get_running_loop().remove_reader(self.socket.fileno())
                    return
                self._on_report(report)


class ApiProcess:
    """One HTTP process."""

    def __init__(self, index: int, origin: int, board: Board) -> None:
        self.index = index
        self.origin = origin
        self.is_serving = False
        self.has_served = False
        self.is_idle = False  # since the order to drain
        self._board = board
        self._num_given = 0
        self.channel = Channel(self._note)
        self.on_serving: Callable[[], None] = lambda: None
        self._process: WorkerProcess | None = None

    @property
    def num_open(self) -> int:
        """Connections it was given that have not ended."""
        return self._num_given - self._board.gauge(self.index, Gauge.CLOSED)

    @property
    def is_ready(self) -> bool:
        """True once the engine has told the process that it is ready; before that it refuses requests."""
        return self._board.gauge(self.index, Gauge.READY) > 0

    @property
    def pid(self) -> int | None:
        """Process id, None before the start."""
        return None if self._process is None else self._process.pid

    def hand_over(self, connection: socket.socket) -> bool:
        """Give it a client's connection. False if it takes none now."""
        is_given = self.channel.hand_over(connection)
        self._num_given += is_given
        return is_given

    async def start(self, setup: ApiSetup) -> None:
        """Start the process; `on_serving` is called when it can serve."""
        self.channel.open()
        descriptors = (setup.board_descriptor, setup.channel_descriptor)
        self._process = await WorkerProcess.start(_MODULE, setup, descriptors)
        self.channel.other_end.close()

    async def wait(self) -> int:
        """Exit status, once there is one; negative for a signal."""
        if self._process is None:
            raise RuntimeError("the process was not started")
        status = await self._process.wait()
        self.is_serving = False
        return status

    async def end(self, timeout_s: float) -> bool:
        """Let the process exit within the time, else kill it. Returns True if it had to be killed."""
        if self._process is None or not self._process.is_running:
            return False
        self.channel.send(EXIT)
        is_polite = self.is_serving and timeout_s > 0
        if is_polite:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), timeout_s)
        was_killed = await self._process.end(told_to_stop=False, at_once=True)
        return was_killed and is_polite

    def _note(self, report: bytes) -> None:
        if report == SERVING:
            self.is_serving = self.has_served = True
            self.on_serving()
        elif report == IDLE:
            self.is_idle = True
