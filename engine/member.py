"""`EngineMember`: the link of one of several HTTP processes to the engine that they share. Starts and ends nothing."""

import socket
from collections import Counter
from collections.abc import Callable, Mapping

from engine.config import EngineConfig
from engine.link import EngineLink
from engine.loads import Loads
from engine.messages import Held, Join, new_address


class EngineMember(EngineLink):
    """Joins a running engine under a number of its own. The ranks that schedule keep the places, each its own, and tell
    who holds them.
    """

    def __init__(self, config: EngineConfig, *, origin: int, loads: Loads | None = None) -> None:
        """`origin` must be a number that no process of this engine has had. `loads` is shared with the others."""
        leaders = range(0, config.num_ranks, config.tensor_parallel_size)
        super().__init__(config, leaders, origin=origin, loads=loads)
        self.num_by_client: Mapping[str, int] = {}
        """Places that each client holds in the whole service, as of the last step of each rank."""
        self.on_freed: Callable[[int], None] = lambda _num_places: None
        """Called with the number of places that came free, in the whole service."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called once all ranks have told this process that they are ready, before anything else hears of it."""
        self._held: dict[int, Held] = {}  # by rank

    def join(self, requests_address: str) -> None:
        """Open the sockets and ask all ranks that schedule for outputs. They begin once the engine has loaded.

        `requests_address` is that of the first rank, which tells the others.
        """
        address = new_address()
        if self.config.nnodes > 1:  # ranks on other hosts send outputs, too
            address = f"tcp://{socket.gethostbyname(self.config.master_addr or '')}:*"
        self._send(Join(self._origin, self._open(requests_address, address)))

    def close(self) -> None:
        """Close the sockets. Requests still running get an error here; the engine is told by who starts processes."""
        self._closing = True
        self._end_streams()
        self._close()

    def _serve_if_ready(self) -> None:
        was_ready = self.info is not None
        super()._serve_if_ready()
        if self.info is not None and not was_ready:
            self.on_ready()

    def _note_held(self, held: Held) -> None:
        before = self._held.get(held.rank)
        self._held[held.rank] = held
        self._router.held[self._scheduler_of(held.rank)] = held.num_by_client
        self.num_by_client = sum((Counter(each.num_by_client) for each in self._held.values()), Counter())
        if before is not None and held.num_freed > before.num_freed:
            self.on_freed(held.num_freed - before.num_freed)
