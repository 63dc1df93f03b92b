"""Turns the scheduler's chunks into a `StepBatch`. Makes no choices and needs no device."""

import numpy as np

from engine.sequence import Chunk
from engine.step import LATE_ID, StepBatch, StepRow

_NO_SLOTS = np.empty(0, dtype=np.int64)
_NO_UPDATES = np.empty((0, 3), dtype=np.int32)


def make_step(chunks: list[Chunk], page_size: int) -> StepBatch:
    """The step that computes these chunks, in this order. Marks the pages in its page updates as sent.

    A chunk may end with one token that the previous step is still choosing; its id is `LATE_ID`.
    """
    rows = [StepRow(chunk.row, chunk.start, chunk.num_tokens, chunk.samples, chunk.num_logit_rows) for chunk in chunks]
    is_decode = all(row.num_tokens == 1 for row in rows)
    make_numbers = _decode_numbers if is_decode else _mixed_numbers
    is_sliding = any(chunk.seq.sliding_pages for chunk in chunks[:1])
    numbers = make_numbers(chunks, page_size, is_sliding)
    return StepBatch(
        rows,
        numbers[0],
        numbers[1],
        numbers[2],
        _page_updates(chunks),
        is_decode,
        numbers[3] if is_sliding else _NO_SLOTS,
        _sliding_page_updates(chunks) if is_sliding else _NO_UPDATES,
    )


def _decode_numbers(chunks: list[Chunk], page_size: int, is_sliding: bool) -> np.ndarray:
    """Ids, positions, slots and sliding slots, if any, [3 or 4, T], of chunks of one token each.

    For so few numbers lists beat array operations.
    """
    ids, positions, slots, sliding_slots = [], [], [], []
    for chunk in chunks:
        seq, start = chunk.seq, chunk.start
        index, offset = divmod(start, page_size)
        ids.append(seq.token_ids[start] if start < len(seq.token_ids) else LATE_ID)
        positions.append(start)
        slots.append(seq.pages[index] * page_size + offset)
        if is_sliding:
            sliding_slots.append(seq.sliding_pages[index] * page_size + offset)
    columns = (ids, positions, slots, sliding_slots) if is_sliding else (ids, positions, slots)
    return np.array(columns, dtype=np.int64)


def _mixed_numbers(chunks: list[Chunk], page_size: int, is_sliding: bool) -> np.ndarray:
    """The same for chunks of any length."""
    numbers = np.empty((3 + is_sliding, sum(chunk.num_tokens for chunk in chunks)), dtype=np.int64)
    row = 0
    for chunk in chunks:
        part = numbers[:, row : row + chunk.num_tokens]
        known = chunk.seq.token_ids[chunk.start : chunk.end]
        part[0, : len(known)] = known
        part[0, len(known) :] = LATE_ID
        part[1] = np.arange(chunk.start, chunk.end)
        part[2] = _slots(chunk.seq.pages, chunk.start, chunk.end, page_size)
        if is_sliding:
            part[3] = _slots(chunk.seq.sliding_pages, chunk.start, chunk.end, page_size)
        row += chunk.num_tokens
    return numbers


def _slots(table: list[int], start: int, end: int, page_size: int) -> np.ndarray:
    """KV slots of the positions [start, end)."""
    first, last = start // page_size, -(-end // page_size)
    pages = np.array(table[first:last], dtype=np.int64)
    slots = pages[:, None] * page_size + np.arange(page_size)
    return slots.reshape(-1)[start - first * page_size : end - first * page_size]


def _page_updates(chunks: list[Chunk]) -> np.ndarray:
    """Pages [U, 3] that the sequences got since their last step: (row, column, page)."""
    updates: list[tuple[int, int, int]] = []
    for chunk in chunks:
        seq = chunk.seq
        if seq.num_sent_pages < len(seq.pages):
            updates += _entries(chunk.row, seq.pages, seq.num_sent_pages)
            seq.num_sent_pages = len(seq.pages)
    return np.array(updates, dtype=np.int32).reshape(-1, 3)


def _sliding_page_updates(chunks: list[Chunk]) -> np.ndarray:
    """The same for sliding pages. Pages that are given back stay in the table: no layer reads them."""
    updates: list[tuple[int, int, int]] = []
    for chunk in chunks:
        seq = chunk.seq
        if seq.num_sent_sliding_pages < len(seq.sliding_pages):
            updates += _entries(chunk.row, seq.sliding_pages, seq.num_sent_sliding_pages)
            seq.num_sent_sliding_pages = len(seq.sliding_pages)
    return np.array(updates, dtype=np.int32).reshape(-1, 3)


def _entries(row: int, pages: list[int], first: int) -> list[tuple[int, int, int]]:
    return [(row, column, pages[column]) for column in range(first, len(pages))]
