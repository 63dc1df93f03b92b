"""`StepBatch`: what one step computes, as plain numbers. No request, no tensor, no device.

The scheduler's choice becomes a `StepBatch` in `batching`, and `runner` runs it. In between it may be packed and sent
to another rank, or kept and run again. Runners that run the same records in the same order have the same page table.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

LATE_ID = -1
"""Stands for an input id that the host does not know yet: the token that the step before chose for the same row."""


class StepRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request of a step: its tokens at positions [start, start + num_tokens).

    `row` is its line in the runner's page table. `samples`: the step ends with a new token for this request.
    `num_logit_rows`: its last tokens, this many, need logits.
    """

    row: int
    start: int
    num_tokens: int
    samples: bool
    num_logit_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """One step. T tokens, all rows flattened in order; U pages that requests got since their last step."""

    rows: list[StepRow]
    input_ids: np.ndarray  # int64 [T]; may hold LATE_ID
    positions: np.ndarray  # int64 [T], position of the token in its request
    slots: np.ndarray  # int64 [T], KV slot (page * page_size + offset) the token's keys are written to
    page_updates: np.ndarray  # int32 [U, 3]: row and column of the page table, and the page to put there
    is_decode: bool  # every row has one token
    sliding_slots: np.ndarray  # int64 [T], the same in sliding layers, if they have pages of their own, else [0]
    sliding_page_updates: np.ndarray  # int32 [W, 3], the same for the page table of sliding layers
    all_ranks_decode: bool = False  # agreed by all ranks that share experts; False is right for every step
    max_rank_tokens: int | None = None  # largest T of any rank in this step; None: unknown, or one scheduler

    @property
    def has_late_ids(self) -> bool:
        """Whether an input id is `LATE_ID`."""
        return bool((self.input_ids == LATE_ID).any())

    @property
    def is_plain_decode(self) -> bool:
        """Whether every row has one token and wants the logits after it."""
        return self.is_decode and all([row.num_logit_rows == 1 for row in self.rows])

    def pack(self) -> bytes:
        """The record as bytes; ranks that exchange it run on machines of the same byte order."""
        numbers = np.concatenate((self.input_ids, self.positions, self.slots, self.sliding_slots))
        return _encoder.encode(
            _PackedStep(
                self.rows,
                len(self.input_ids),
                self.is_decode,
                self.all_ranks_decode,
                self.max_rank_tokens,
                numbers.data,
                self.page_updates.data,
                self.sliding_page_updates.data,
            )
        )

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> "StepBatch":
        """The record that `pack` made bytes of. Its arrays are read-only views of `data`.

        Raises:
            ValueError: (msgspec's DecodeError) the bytes are no record.
        """
        packed = _decoder.decode(data)
        numbers, num_tokens = np.frombuffer(packed.numbers, dtype=np.int64), packed.num_tokens
        updates, sliding_updates = (
            np.frombuffer(data, dtype=np.int32).reshape(-1, 3)
            for data in (packed.page_updates, packed.sliding_page_updates)
        )
        ids, positions, slots = numbers[: 3 * num_tokens].reshape(3, num_tokens)
        return cls(
            packed.rows,
            ids,
            positions,
            slots,
            updates,
            packed.is_decode,
            numbers[3 * num_tokens :],
            sliding_updates,
            packed.all_ranks_decode,
            packed.max_rank_tokens,
        )


class _PackedStep(msgspec.Struct, frozen=True, array_like=True):
    rows: list[StepRow]
    num_tokens: int
    is_decode: bool
    all_ranks_decode: bool
    max_rank_tokens: int | None
    numbers: memoryview
    page_updates: memoryview
    sliding_page_updates: memoryview


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_PackedStep)
