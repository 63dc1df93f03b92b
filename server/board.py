"""`Board`: shared memory in which HTTP processes count, each in a slot of its own. One writes a slot, all read it.

    slot       | used bytes | gauges             | counter | counter | ... unused
    counter    | length of the key | value | key, padded to whole words

Behind the slots are the requests and tokens at each scheduler (`engine.loads`), a row for each slot, and the numbers of
API keys (`server.key_limits`), which are written inside a `Turn`.

Words are of 8 bytes and are written whole, so nobody needs a lock: a counter is complete before `used` covers it. The
numbers outlive their process; another one continues in the same slot, so no count is lost when a process dies.
The memory has no name and needs no folder; it is gone with the last process that has it.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Sequence
from types import TracebackType

from engine.loads import NUM_COLUMNS, Loads
from server.key_limits import NUM_SHARED, KeyMemory
from server.tally import Gauge

_WORD = 8
_PAGE_WORDS = mmap.PAGESIZE // _WORD
_NUM_HEADER_WORDS = 1 + len(Gauge)
_SLOT_BYTES = 512 * 1024  # for what does not depend on the model's names; unused pages take no memory
_COUNTERS_PER_NAME = 256
_BYTES_PER_COUNTER = 128  # without the served name


class Board:
    """All slots. The process that makes it hands `descriptor` to the others."""

    def __init__(
        self, descriptor: int, num_slots: int, started_s: float, num_keys: int = 0, num_schedulers: int = 1
    ) -> None:
        """Use the memory behind a descriptor that `create` has made, in whatever process."""
        self.descriptor = descriptor
        self.num_slots = num_slots
        self._num_keys = num_keys
        self._num_schedulers = num_schedulers
        self.started_s = started_s
        self._memory = memoryview(mmap.mmap(descriptor, 0))
        self.words = self._memory.cast("Q")
        self.values = self._memory.cast("d")
        self._num_key_words = num_keys * (NUM_SHARED + num_slots)
        self._loads_end = len(self.words) - self._num_key_words
        self._loads_start = self._loads_end - num_slots * NUM_COLUMNS * num_schedulers
        self.num_slot_words = self._loads_start // num_slots // _PAGE_WORDS * _PAGE_WORDS

    @classmethod
    def create(cls, num_slots: int, served_names: Sequence[str], num_keys: int = 0, num_schedulers: int = 1) -> "Board":
        """New memory with room for every counter there can be."""
        descriptor = os.memfd_create("moe-serve-board")
        name_bytes = sum(_COUNTERS_PER_NAME * (_BYTES_PER_COUNTER + len(name.encode())) for name in served_names)
        slot_bytes = -(-(_SLOT_BYTES + name_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        num_words = num_keys * (NUM_SHARED + num_slots) + num_slots * NUM_COLUMNS * num_schedulers
        os.ftruncate(descriptor, num_slots * slot_bytes + -(-_WORD * num_words // mmap.PAGESIZE) * mmap.PAGESIZE)
        return cls(descriptor, num_slots, time.time(), num_keys, num_schedulers)

    def loads(self, index: int) -> Loads:
        """Requests and tokens at each scheduler, for the process of a slot."""
        return Loads(self._num_schedulers, self.words[self._loads_start : self._loads_end], index)

    def key_memory(self, index: int) -> KeyMemory:
        """The numbers of API keys, for the process of a slot."""
        numbers = self.values[len(self.values) - self._num_key_words :]
        return KeyMemory(numbers, Turn(self, place=1), num_slots=self.num_slots, slot=index)

    def gauge(self, index: int, gauge: Gauge) -> int:
        """One slot's gauge."""
        return self.words[index * self.num_slot_words + 1 + gauge]

    def set_gauge(self, index: int, gauge: Gauge, value: int) -> None:
        """Set one slot's gauge."""
        self.words[index * self.num_slot_words + 1 + gauge] = value

    def reset_gauges(self, index: int) -> None:
        """The slot's process has ended; its counters stay."""
        for gauge in Gauge:
            self.set_gauge(index, gauge, 0)
        self.loads(index).reset()
        if self._num_keys:
            memory = self.key_memory(index)
            with memory.turn:
                for place in range(NUM_SHARED + index, self._num_key_words, NUM_SHARED + self.num_slots):
                    memory.numbers[place] = 0.0

    def sum_gauge(self, gauge: Gauge) -> int:
        """Sum over all slots."""
        return sum(self.gauge(index, gauge) for index in range(self.num_slots))

    def counters(self, index: int) -> list[tuple[str, int]]:
        """Keys of a slot's counters, and where in `values` each one's value is."""
        word = index * self.num_slot_words + _NUM_HEADER_WORDS
        end = word + self.words[index * self.num_slot_words]
        found = []
        while word < end:
            num_bytes = self.words[word]
            start = (word + 2) * _WORD
            found.append((bytes(self._memory[start : start + num_bytes]).decode(), word + 1))
            word += 2 + -(-num_bytes // _WORD)
        return found

    def append(self, index: int, key: str) -> int:
        """Make a counter at 0; returns where its value is. Raises MemoryError if the slot is full."""
        data = key.encode()
        base = index * self.num_slot_words
        word = base + _NUM_HEADER_WORDS + self.words[base]
        num_words = 2 + -(-len(data) // _WORD)
        if word + num_words > base + self.num_slot_words:
            raise MemoryError("the memory for metrics is full")
        start = (word + 2) * _WORD
        self._memory[start : start + len(data)] = data
        self.words[word] = len(data)
        self.values[word + 1] = 0.0
        self.words[base] += num_words
        return word + 1


class SharedTally:
    """The numbers of one of several HTTP processes, in a slot of the board."""

    def __init__(self, board: Board, index: int) -> None:
        self.started_s = board.started_s
        self._board = board
        self._index = index
        self._places = dict(board.counters(index))

    def add(self, key: str, amount: float) -> None:
        """Add to a counter of this slot."""
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self._board.append(self._index, key)
        self._board.values[place] += amount

    def totals(self) -> dict[str, float]:
        """All counters, summed over all slots."""
        totals: dict[str, float] = {}
        for index in range(self._board.num_slots):
            for key, place in self._board.counters(index):
                totals[key] = totals.get(key, 0.0) + self._board.values[place]
        return totals

    def set_gauge(self, gauge: Gauge, value: int) -> None:
        """Set this slot's gauge."""
        self._board.set_gauge(self._index, gauge, value)

    def sum_gauge(self, gauge: Gauge) -> int:
        """Sum over all slots."""
        return self._board.sum_gauge(gauge)


class Turn:
    """`with turn:` waits until no other process is inside. The system ends the turn of a process that dies.

    Threads of one process do not exclude each other, nor do turns at different places.
    """

    def __init__(self, board: Board, place: int = 0) -> None:
        self._descriptor = board.descriptor
        self._place = place

    def __enter__(self) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, self._place)

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._place)
