"""Turns the scheduler's chunks into a `StepBatch`. Makes no choices and needs no device."""

import numpy as np

from engine.sequence import Chunk, Sequence
from engine.step import LATE_ID, StepBatch, StepRow


def make_step(chunks: list[Chunk], page_size: int) -> StepBatch:
    """The step that computes these chunks, in this order. Marks the pages in its page updates as sent.

    A chunk may end with one token that the previous step is still choosing; its id is `LATE_ID`.
    """
    rows = [StepRow(chunk.row, chunk.start, chunk.num_tokens, chunk.samples, chunk.num_logit_rows) for chunk in chunks]
    is_decode = all(row.num_tokens == 1 for row in rows)
    numbers = _decode_numbers(chunks, page_size) if is_decode else _mixed_numbers(chunks, page_size)
    return StepBatch(rows, numbers[0], numbers[1], numbers[2], _page_updates(chunks), is_decode)


def _decode_numbers(chunks: list[Chunk], page_size: int) -> np.ndarray:
    """Ids, positions and slots [3, T] of chunks of one token each; for so few numbers lists beat array operations."""
    ids, positions, slots = [], [], []
    for chunk in chunks:
        seq, start = chunk.seq, chunk.start
        index, offset = divmod(start, page_size)
        ids.append(seq.token_ids[start] if start < len(seq.token_ids) else LATE_ID)
        positions.append(start)
        slots.append(seq.pages[index] * page_size + offset)
    return np.array((ids, positions, slots), dtype=np.int64)


def _mixed_numbers(chunks: list[Chunk], page_size: int) -> np.ndarray:
    """The same for chunks of any length."""
    numbers = np.empty((3, sum(chunk.num_tokens for chunk in chunks)), dtype=np.int64)
    row = 0
    for chunk in chunks:
        ids_T, positions_T, slots_T = numbers[:, row : row + chunk.num_tokens]
        known = chunk.seq.token_ids[chunk.start : chunk.end]
        ids_T[: len(known)] = known
        ids_T[len(known) :] = LATE_ID
        positions_T[:] = np.arange(chunk.start, chunk.end)
        slots_T[:] = _slots(chunk.seq, chunk.start, chunk.end, page_size)
        row += chunk.num_tokens
    return numbers


def _slots(seq: Sequence, start: int, end: int, page_size: int) -> np.ndarray:
    """KV slots of the positions [start, end)."""
    first, last = start // page_size, -(-end // page_size)
    pages = np.array(seq.pages[first:last], dtype=np.int64)
    slots = pages[:, None] * page_size + np.arange(page_size)
    return slots.reshape(-1)[start - first * page_size : end - first * page_size]


def _page_updates(chunks: list[Chunk]) -> np.ndarray:
    """Pages [U, 3] that the sequences got since their last step: (row, column, page)."""
    updates: list[tuple[int, int, int]] = []
    for chunk in chunks:
        seq = chunk.seq
        if seq.num_sent_pages < len(seq.pages):
            updates += [(chunk.row, column, seq.pages[column]) for column in range(seq.num_sent_pages, len(seq.pages))]
            seq.num_sent_pages = len(seq.pages)
    return np.array(updates, dtype=np.int32).reshape(-1, 3)
