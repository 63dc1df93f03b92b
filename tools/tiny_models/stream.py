"""Generates training batches in worker processes: documents packed into rows of one length.

A batch is an int16 array [4, rows, length]: ids, targets (-1: not trained), document numbers, positions.
"""

from __future__ import annotations

import multiprocessing
import queue
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from tools.tiny_models.data.mix import draw
from tools.tiny_models.dialect import Encoder
from tools.tiny_models.families import load_family

IGNORE = -1


def pack_rows(
    encoder: Encoder, rng: random.Random, length: int, shares: dict[str, float] | None = None, open_rows: int = 8
) -> Iterator[np.ndarray]:
    """Endless rows [4, length]. A document goes to the fullest open row it fits; if there is none, a row leaves."""
    rows: list[list[tuple[list[int], int]]] = [[] for _ in range(open_rows)]
    used = [0] * open_rows
    while True:
        ids, prompt = encoder.example(encoder.dialect.adapted(rng, draw(rng, shares)))
        if len(ids) > length:
            continue
        fits = [index for index in range(open_rows) if used[index] + len(ids) <= length]
        if not fits:
            fullest = max(range(open_rows), key=used.__getitem__)
            yield as_row(rows[fullest], length)
            rows[fullest], used[fullest] = [], 0
            fits = [fullest]
        best = max(fits, key=used.__getitem__)
        rows[best].append((ids, prompt))
        used[best] += len(ids)


def as_row(documents: list[tuple[list[int], int]], length: int) -> np.ndarray:
    """One row; the rest after the last document is a document of its own without targets."""
    row = np.zeros((4, length), dtype=np.int16)
    row[1] = IGNORE
    row[2] = len(documents)
    at = 0
    for number, (ids, prompt) in enumerate(documents):
        end = at + len(ids)
        row[0, at:end] = ids
        row[1, at + prompt - 1 : end - 1] = ids[prompt:]
        row[2, at:end] = number
        row[3, at:end] = np.arange(len(ids))
        at = end
    row[3, at:] = np.arange(length - at)
    return row


def work(family: str, seed: str, rows: int, length: int, shares: dict[str, float], out: Any) -> None:
    """A worker: puts batches of `rows` rows until the queue's owner ends it."""
    stream = pack_rows(load_family(family).dialect.encoder(), random.Random(seed), length, shares)
    while True:
        out.put(np.stack([next(stream) for _ in range(rows)], axis=1))


class Stream:
    """Batches [4, rows, length] from `workers` processes; each worker makes `chunk` rows at a time."""

    def __init__(
        self, *, family: str, seed: str, workers: int, rows: int, length: int, chunk: int = 16,
        shares: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        if rows % chunk:
            raise ValueError(f"rows is {rows}: must be a multiple of chunk, {chunk}")
        context = multiprocessing.get_context("spawn")
        self._chunks = rows // chunk
        self._queue: Any = context.Queue(maxsize=40 * self._chunks)
        self._workers = [
            context.Process(
                target=work, args=(family, f"{seed}/{number}", chunk, length, shares or {}, self._queue), daemon=True
            )
            for number in range(workers)
        ]
        for worker in self._workers:
            worker.start()

        # A thread waits for the processes, so that the trainer never does.
        self._ready: queue.Queue[np.ndarray | None] = queue.Queue(maxsize=8)
        threading.Thread(target=self._collect, daemon=True).start()

    def _collect(self) -> None:
        parts: list[np.ndarray] = []
        while True:
            try:
                parts.append(self._queue.get(timeout=20))
            except queue.Empty:
                if not all(worker.is_alive() for worker in self._workers):
                    self._ready.put(None)
                    return
            if len(parts) == self._chunks:
                self._ready.put(np.concatenate(parts, axis=1))
                parts = []

    def next(self) -> np.ndarray:
        """Waits for a batch. Raises RuntimeError where a worker died."""
        batch = self._ready.get()
        if batch is None:
            raise RuntimeError("a data worker died")
        return batch

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
