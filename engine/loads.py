"""`Loads`: requests and tokens at each scheduler, in memory that the HTTP processes of one engine share.

row  | requests at scheduler 0, 1, ... | tokens at scheduler 0, 1, ...
"""

NUM_COLUMNS = 2


class Loads:
    """One row an HTTP process: it writes its own and reads all. The numbers are never negative."""

    def __init__(
        self, num_schedulers: int, numbers: "list[int] | memoryview[int] | None" = None, own_row: int = 0
    ) -> None:
        """`numbers` has a row of `NUM_COLUMNS * num_schedulers` for each process; None if there is one process."""
        self.own_row = own_row
        self._num_schedulers = num_schedulers
        self._width = NUM_COLUMNS * num_schedulers
        self._numbers = [0] * self._width if numbers is None else numbers

    def add(self, scheduler: int, *, num_requests: int = 0, num_tokens: int = 0) -> None:
        """Add to this process's own numbers, or take from them."""
        place = self.own_row * self._width + scheduler
        self._numbers[place] += num_requests
        self._numbers[place + self._num_schedulers] += num_tokens

    def reset(self) -> None:
        """The process is gone, and so are its requests."""
        for place in range(self.own_row * self._width, (self.own_row + 1) * self._width):
            self._numbers[place] = 0

    def num_requests(self) -> list[int]:
        """At each scheduler, from all processes."""
        return [sum(self._numbers[place :: self._width]) for place in range(self._num_schedulers)]

    def num_tokens(self) -> list[int]:
        """At each scheduler, from all processes: those of prompts and of answers so far."""
        return [sum(self._numbers[place :: self._width]) for place in range(self._num_schedulers, self._width)]
