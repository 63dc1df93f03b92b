"""`WordLink`: how the ranks that schedule tell each other what `Agreement` compares, over TCP. No torch.

Every two of these ranks have a connection of their own, and no thread passes the words on, as gloo's do. Sending never
blocks: a word is three numbers, and a connection holds at most two of them, since no rank says its next word before it
has heard all of this turn. For the same reason the next one that a connection brings is always of this turn.
"""

import socket
import struct

_WORD = struct.Struct("!3q")


class RanksLostError(RuntimeError):
    """Another rank has closed its connection, or its process or host is gone."""


class WordLink:
    """One rank's connections to the others. All ranks make the same calls."""

    def __init__(self, connections: list[socket.socket]) -> None:
        """`connections` are TCP and blocking, one to each other rank, in any order."""
        for each in connections:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections = connections
        self._readers = [each.makefile("rb") for each in connections]

    @classmethod
    def connect(cls, listener: socket.socket, earlier: list[tuple[str, int]], num_later: int) -> "WordLink":
        """Connect to the ranks before this one, and let those after it connect to `listener`. Closes it."""
        with listener:
            connections = [socket.create_connection(address) for address in earlier]
            return cls(connections + [listener.accept()[0] for _ in range(num_later)])

    def max_over_ranks(self, values: list[int]) -> list[int]:
        """Element-wise maximum of the three values over all ranks; blocks until all have called it.

        Raises:
            RanksLostError: another rank has left.
        """
        word, words = _WORD.pack(*values), [tuple(values)]
        try:
            for connection in self._connections:
                connection.sendall(word)
            for reader in self._readers:
                words.append(_WORD.unpack(reader.read(_WORD.size)))
        except (OSError, struct.error) as error:  # a connection that ends gives less than a word
            raise RanksLostError("a connection to another rank that schedules has ended") from error
        return [max(numbers) for numbers in zip(*words, strict=True)]

    def close(self) -> None:
        """End the connections. What has been sent still arrives."""
        for reader, connection in zip(self._readers, self._connections, strict=True):
            reader.close()
            connection.close()
