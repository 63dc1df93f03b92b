"""`Acceptor`: accepts connections on the listening socket and gives each to the HTTP process that has the fewest open.

Once a process knows that the engine is ready, those that do not know it yet get none: they would refuse requests after
the service has said that it is ready.

One socket for all, accepted here and not by the processes: connections are spread evenly by what is open, which counts
for long streams, and those that wait are not lost with a process that dies. A port in use is noticed as by a single
process, which the option SO_REUSEPORT would prevent.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Sequence
from typing import Protocol

from server.open_files import FullWarning

log = logging.getLogger(__name__)

_BURST = 64  # connections accepted before other work has its turn
_RETRY_S = 0.05
_ERROR_RETRY_S = 1.0


class Receiver(Protocol):
    """A process that serves connections."""

    @property
    def num_open(self) -> int:
        """Connections it was given that have not ended."""

    @property
    def is_ready(self) -> bool:
        """Whether it knows that the engine is ready."""

    def hand_over(self, connection: socket.socket) -> bool:
        """Give it a connection. False if it takes none now."""


class Acceptor:
    """Belongs to one event loop. Accepts while there are receivers; else connections wait in the socket's queue."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._full = FullWarning()
        self._receivers: list[Receiver] = []
        self._waiting: socket.socket | None = None  # accepted, but no receiver has taken it yet
        self._is_accepting = False
        self._retry: asyncio.TimerHandle | None = None

    def set_receivers(self, receivers: Sequence[Receiver]) -> None:
        """Who gets connections from now on."""
        self._receivers = list(receivers)
        if self._receivers:
            self._resume()
        else:
            self._pause()

    def close(self) -> None:
        """Accept nothing more, and stop listening."""
        self._pause()
        self._listener.close()
        if self._waiting is not None:
            self._waiting.close()

    def _resume(self) -> None:
        self._retry = None
        if self._waiting is not None and not self._give(self._waiting):
            self._pause(_RETRY_S)
        elif not self._is_accepting and self._receivers:
            self._is_accepting = True
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _pause(self, retry_s: float | None = None) -> None:
        """Stop accepting, for a while or until there are receivers again."""
        if self._is_accepting:
            self._is_accepting = False
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if retry_s is not None:
            self._retry = asyncio.get_running_loop().call_later(retry_s, self._resume)

    def _accept(self) -> None:
        for _ in range(_BURST):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of descriptors or memory
                if error.errno == errno.EMFILE:
                    self._full.give()
                else:
                    log.error("no connections can be accepted now: %s", error.strerror)
                self._pause(_ERROR_RETRY_S)
                return
            if not self._give(connection):
                self._waiting = connection
                self._pause(_RETRY_S)
                return

    def _give(self, connection: socket.socket) -> bool:
        ready = [each for each in self._receivers if each.is_ready]
        for receiver in sorted(ready or self._receivers, key=lambda each: each.num_open):
            if receiver.hand_over(connection):
                self._receivers.remove(receiver)  # to the end: those with equally many take turns
                self._receivers.append(receiver)
                connection.close()
                self._waiting = None
                return True
        return False
