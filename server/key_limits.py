"""`KeyLimits`: answers in flight and tokens a minute of each key, for the service as a whole.

Tokens are a bucket: a key may spend its `tokens_per_minute` at once, and as many flow back in each minute. The
tokens of an answer and of its prompt are counted when it ends, so a key may overdraw its bucket; then it waits until
the debt is paid. So a long answer never ends in the middle.

    numbers of a key | tokens spent, less those that flowed back | when that was true | in flight in process 0 | 1 | ...
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from server.config import ServerConfig
from server.errors import BadRequest, TooManyRequests
from server.keys import ClientKey

_SPENT, _WHEN_S, NUM_SHARED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class KeyMemory:
    """The numbers of all keys, in one process's memory or on the board.

    Every number is read and written inside `turn`. Each of `num_slots` processes counts in flight in its own `slot`.
    """

    numbers: "memoryview[float]"
    turn: AbstractContextManager[object]
    num_slots: int = 1
    slot: int = 0


def own_memory(num_keys: int) -> KeyMemory:
    """For a service of one HTTP process."""
    return KeyMemory(memoryview(bytearray(8 * num_keys * (NUM_SHARED + 1))).cast("d"), nullcontext())


class KeyLimits:
    """Admits answers. Keys are numbers, as `server.keys.Keyring` finds them; None has no limits."""

    def __init__(
        self, config: ServerConfig, memory: KeyMemory | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = config.api_keys
        self._memory = memory or own_memory(len(self._keys))
        self._clock = clock

    def check(self, key: int | None, num_answers: int) -> None:
        """Raise what `admitted` would raise now, before work is done for a request."""
        if key is not None and _has_limits(self._keys[key]):
            with self._memory.turn:
                self._check(self._keys[key], self._numbers(key), num_answers)

    @contextmanager
    def admitted(self, key: int | None, num_answers: int, num_tokens: Callable[[], int]) -> Iterator[None]:
        """Hold places while a request is answered, and count its tokens at the end.

        Raises:
            TooManyRequests: the key has too many answers in flight, or has spent its tokens; says when to come back.
            BadRequest: it asks for more answers than a key may have.
        """
        if key is None or not _has_limits(limits := self._keys[key]):
            yield
            return
        numbers, place = self._numbers(key), NUM_SHARED + self._memory.slot
        with self._memory.turn:
            self._check(limits, numbers, num_answers)
            numbers[place] += num_answers
        num_spent = 0
        try:
            yield
            num_spent = num_tokens()
        except TooManyRequests:
            raise  # the engine refused it: it has cost nothing
        except BaseException:  # the client left, or the engine failed
            num_spent = num_tokens()
            raise
        finally:
            with self._memory.turn:
                numbers[place] -= num_answers
                self._flow_back(limits, numbers)
                numbers[_SPENT] += num_spent

    def _numbers(self, key: int) -> "memoryview[float]":
        size = NUM_SHARED + self._memory.num_slots
        return self._memory.numbers[key * size : (key + 1) * size]

    def _check(self, limits: ClientKey, numbers: "memoryview[float]", num_answers: int) -> None:
        if (most := limits.max_requests) is not None:
            if num_answers > most:
                raise BadRequest(
                    f"n: {num_answers} answers are asked for, n for each prompt, and this key may have {most} at once",
                    param="n",
                )
            if sum(numbers[NUM_SHARED:]) + num_answers > most:
                raise _limited(f"this key has {most} answers in flight, as many as it may have", 1)
        if (budget := limits.tokens_per_minute) is not None:
            self._flow_back(limits, numbers)
            excess = numbers[_SPENT] - budget
            if excess >= 0:
                raise _limited(f"this key has spent its {budget} tokens a minute", math.floor(60 * excess / budget) + 1)

    def _flow_back(self, limits: ClientKey, numbers: "memoryview[float]") -> None:
        now_s = self._clock()
        elapsed_s = max(0.0, now_s - numbers[_WHEN_S])
        numbers[_SPENT] = max(0.0, numbers[_SPENT] - elapsed_s * (limits.tokens_per_minute or 0) / 60)
        numbers[_WHEN_S] = now_s


def _has_limits(key: ClientKey) -> bool:
    return key.max_requests is not None or key.tokens_per_minute is not None


def _limited(message: str, wait_s: int) -> TooManyRequests:
    error = TooManyRequests(f"{message}; try again in {wait_s} s", code="rate_limit_exceeded")
    error.retry_after_s = wait_s
    error.what = "key"
    return error
