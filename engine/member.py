"""`EngineMember`: the link of one of several HTTP processes to the engine that they share. Starts and ends nothing."""

from collections.abc import Callable, Mapping

from engine.config import EngineConfig
from engine.link import EngineLink
from engine.messages import Held, Join


class EngineMember(EngineLink):
    """Joins a running engine under a number of its own. The engine keeps the places, and tells who holds them."""

    def __init__(self, config: EngineConfig, *, origin: int) -> None:
        """`origin` must be a number that no process of this engine has had."""
        super().__init__(config, origin=origin)
        self.num_by_client: Mapping[str, int] = {}
        """Places that each client holds in the whole service, as of the engine's last step."""
        self.on_freed: Callable[[int], None] = lambda _num_places: None
        """Called with the number of places that came free, in the whole service."""
        self._num_freed: int | None = None

    def join(self, requests_address: str) -> None:
        """Open the sockets and ask for outputs. They begin once the engine has loaded."""
        outputs_address = self._open(requests_address)
        self._send(Join(self._origin, outputs_address))

    def close(self) -> None:
        """Close the sockets. Requests still running get an error here; the engine is told by who starts processes."""
        self._closing = True
        self._end_streams()
        self._close()

    def _note_held(self, held: Held) -> None:
        self.num_by_client = held.num_by_client
        if self._num_freed is not None and held.num_freed > self._num_freed:
            self.on_freed(held.num_freed - self._num_freed)
        self._num_freed = held.num_freed
