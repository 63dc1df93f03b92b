"""Which tokens each running request has met, as one table on the device, for penalties.

The table has a line for each place of a running request. The host keeps whose tokens a line holds and how many of them
are counted, so a line is cleared when another request needs it, and a request that returns goes on where it was.

Shape letters: M places, V vocabulary.
"""

import numpy as np
import torch

from engine.sequence import Sequence

_NONE = np.zeros(0, dtype=np.int64)


class TokenTable:
    """Token counts [M, V]. `changes` says what to do, the caller does it and then calls `commit`."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.counts_MV = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int32, device=device)
        self._owners: list[object | None] = [None] * max_num_seqs  # their `sampler_state`, which lives as long as they
        self._num_counted = [0] * max_num_seqs
        self._changed: list[tuple[int, object, int]] = []

    def changes(self, seqs: list[Sequence], places: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Places to clear, then entries `(place << 32) + 2 * id + is_prompt` to count, so that the lines are right."""
        cleared, entries = [], []
        self._changed = []
        for seq, place in zip(seqs, places, strict=True):
            num_counted = self._num_counted[place]
            if self._owners[place] is not seq.sampler_state or num_counted > len(seq.token_ids):
                num_counted = 0
                cleared.append(place)
            ids = np.array(seq.token_ids[num_counted:], dtype=np.int64)
            is_prompt = np.arange(num_counted, num_counted + len(ids)) < seq.num_prompt
            entries.append((place << 32) + 2 * ids + is_prompt)
            self._changed.append((place, seq.sampler_state, len(seq.token_ids)))
            self._owners[place] = None  # until the device has been told
        return np.array(cleared, dtype=np.int64), np.concatenate([_NONE, *entries])

    def commit(self) -> None:
        """The changes are launched."""
        for place, owner, num_counted in self._changed:
            self._owners[place], self._num_counted[place] = owner, num_counted
        self._changed = []
