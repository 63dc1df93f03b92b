"""`ThinkingLimit`: ends the reasoning of an answer by force once its budget of tokens is used. Knows no dialect.

    generated   begin_ids  t1 t2 ... tn  close_ids  anything but barred_id
                           counted       forced

It is a mask of the next token (`engine.sequence.LogitMask`), so it works wherever masks do.
"""

import numpy as np

from engine.sequence import LogitMask
from engine.types import ThinkingBudget


class ThinkingLimit:
    """Follows one answer. Call it with all generated tokens; those that it knows already are not read again."""

    def __init__(self, budget: ThinkingBudget, vocab_size: int) -> None:
        self._budget = budget
        self._vocab_size = vocab_size
        self._num_read = 0
        self._num_thought = 0
        self._is_thinking = budget.begins_inside
        self._num_closed = 0  # tokens of `close_ids` that were generated since the budget was used

    def __call__(self, generated: list[int]) -> np.ndarray | None:
        """Which tokens may come next, bool [V]; None: all."""
        while self._num_read < len(generated):
            self._num_read += 1
            self._read(generated, self._num_read)
        budget = self._budget
        if self._num_closed == len(budget.close_ids):
            return None if budget.barred_id is None else self._mask(budget.barred_id, is_barred=True)
        if self._num_closed or (self._is_thinking and self._num_thought >= budget.num_tokens):
            return self._mask(budget.close_ids[self._num_closed], is_barred=False)
        return None

    def _read(self, generated: list[int], end: int) -> None:
        """Take in the last of the first `end` tokens."""
        budget, token = self._budget, generated[end - 1]
        is_spent = self._num_thought >= budget.num_tokens
        closes = self._num_closed or (self._is_thinking and is_spent)
        if closes and self._num_closed < len(budget.close_ids) and token == budget.close_ids[self._num_closed]:
            self._num_closed += 1
            self._is_thinking = False
            return
        self._num_closed = 0
        if token in budget.end_ids:
            self._is_thinking = False
        elif self._is_thinking:
            self._num_thought += 1
        elif tuple(generated[max(0, end - len(budget.begin_ids)) : end]) == budget.begin_ids:
            self._is_thinking = True

    def _mask(self, token: int, *, is_barred: bool) -> np.ndarray:
        allowed_V = np.full(self._vocab_size, is_barred)
        allowed_V[token] = not is_barred
        return allowed_V


def both(first: LogitMask | None, second: LogitMask | None) -> LogitMask | None:
    """The mask that allows what both allow. Where they agree on nothing, the first one decides."""
    if first is None or second is None:
        return first or second

    def mask(generated: list[int]) -> np.ndarray | None:
        one_V, other_V = first(generated), second(generated)
        if one_V is None or other_V is None:
            return other_V if one_V is None else one_V
        joint_V: np.ndarray = one_V & other_V
        return joint_V if joint_V.any() else one_V

    return mask
