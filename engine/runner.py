"""Turns the chunks of a step into a `ForwardBatch` and runs the model on it. Chooses neither work nor tokens.

Shape letters: T tokens of the step, B chunks, P pages of the longest chunk's sequence, R logit rows, V vocabulary.
The integers of a step are built in two numpy arrays, one of 64 and one of 32 bits, so that each reaches the device in
one copy; the tensors of the batch are views of them.
"""

from collections.abc import Sequence as ListLike
from typing import Protocol

import numpy as np
import torch

from engine.cuda_graphs import DecodeGraphs
from engine.sequence import Chunk
from model.batch import ForwardBatch, KvLayerSpec, LayerKv
from moe.check.selfcheck import SelfCheckReport


class MoePath(Protocol):
    """What the engine needs of a MoE layer."""

    description: str
    selfcheck: SelfCheckReport | None


class Model(Protocol):
    """What the engine needs of a model."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    kv_specs: list[KvLayerSpec]
    dtype: torch.dtype
    device: torch.device

    @property
    def moe_layers(self) -> ListLike[MoePath]:
        """Empty for a model without experts."""

    def why_not_capturable(self, max_num_tokens: int) -> str | None:
        """None if decode steps of up to `max_num_tokens` tokens can be captured in CUDA graphs, else what cannot."""

    def prepare_replay(self) -> None:
        """What cannot be part of a captured step; called before each capture and replay."""

    def __call__(self, batch: ForwardBatch, kv: list[LayerKv]) -> torch.Tensor:
        """Logits [R, V] in float32."""


def num_logit_rows(chunk: Chunk) -> int:
    """Logit rows a chunk wants: all of them for prompt log-probabilities, else the last one if it samples."""
    if chunk.seq.wants_prompt_logprobs:
        return chunk.num_tokens
    return 1 if chunk.samples else 0


class ModelRunner:
    """Holds the KV tensors and the page table of the running sequences (`Sequence.row` is the line in it)."""

    def __init__(
        self, model: Model, kv: list[LayerKv], *, page_size: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.model = model
        self.kv = kv
        self.graphs: DecodeGraphs | None = None
        self.page_size = page_size
        self._page_table = np.zeros((max_num_seqs, -(-max_model_len // page_size)), dtype=np.int32)

    @torch.inference_mode()
    def run(self, chunks: list[Chunk]) -> torch.Tensor:
        """Logits [R, V], rows in the order of the chunks, `num_logit_rows` each. Writes the chunks' keys and values."""
        batch = self.build(chunks)
        if self.graphs is not None and self.graphs.serves(batch):
            return self.graphs.run(batch)
        return self.model(batch, self.kv)

    def build(self, chunks: list[Chunk]) -> ForwardBatch:
        """The batch of these chunks, on the model's device."""
        num_chunks = len(chunks)
        query_lens = [chunk.num_tokens for chunk in chunks]
        seq_lens = [chunk.start + chunk.num_tokens for chunk in chunks]
        num_rows = [num_logit_rows(chunk) for chunk in chunks]
        num_pages = -(-max(seq_lens) // self.page_size)
        table_rows = self._update_table(chunks)

        ints32 = np.empty(num_chunks * (2 + num_pages) + 1, dtype=np.int32)
        if query_lens.count(1) == num_rows.count(1) == num_chunks:
            ints32[: 2 * num_chunks + 1] = [*range(num_chunks + 1), *seq_lens]
            ints64 = self._decode_numbers(chunks)
        else:
            ints32[0] = 0
            np.cumsum(query_lens, out=ints32[1 : num_chunks + 1])
            ints32[num_chunks + 1 : 2 * num_chunks + 1] = seq_lens
            ints64 = self._mixed_numbers(chunks, ints32[1 : num_chunks + 1], table_rows, num_rows)
        ints32[2 * num_chunks + 1 :].reshape(num_chunks, num_pages)[:] = self._page_table[table_rows, :num_pages]
        return self._to_batch(ints64, ints32, query_lens, seq_lens)

    def _decode_numbers(self, chunks: list[Chunk]) -> np.ndarray:
        """Ids, positions, slots and logit rows, each chunk one token; for so few, lists beat array operations."""
        positions = [chunk.start for chunk in chunks]
        ids = [chunk.seq.token_ids[chunk.start] for chunk in chunks]
        slots = []
        for chunk in chunks:
            index, offset = divmod(chunk.start, self.page_size)
            slots.append(chunk.seq.pages[index] * self.page_size + offset)
        return np.array([*ids, *positions, *slots, *range(len(chunks))], dtype=np.int64)

    def _mixed_numbers(
        self, chunks: list[Chunk], query_ends: np.ndarray, table_rows: list[int], num_rows: list[int]
    ) -> np.ndarray:
        """The same for chunks of any length; chunk b ends before row `query_ends[b]` of T."""
        query_lens = [chunk.num_tokens for chunk in chunks]
        num_tokens = int(query_ends[-1])
        ints64 = np.empty(3 * num_tokens + sum(num_rows), dtype=np.int64)
        input_ids, positions, slots = ints64[: 3 * num_tokens].reshape(3, num_tokens)
        input_ids[:] = [token for chunk in chunks for token in chunk.seq.token_ids[chunk.start : chunk.end]]
        ends = np.array([chunk.end for chunk in chunks])
        positions[:] = np.arange(num_tokens) + np.repeat(ends - query_ends, query_lens)
        page_index, offset = np.divmod(positions, self.page_size)
        slots[:] = self._page_table[np.repeat(table_rows, query_lens), page_index]
        slots *= self.page_size
        slots += offset
        ints64[3 * num_tokens :] = _last_rows(query_ends, num_rows)
        return ints64

    def _update_table(self, chunks: list[Chunk]) -> list[int]:
        """Copy pages that sequences got since their last step; the table lines of the chunks."""
        rows = []
        for chunk in chunks:
            seq = chunk.seq
            if seq.num_table_pages < len(seq.pages):
                self._page_table[seq.row, seq.num_table_pages : len(seq.pages)] = seq.pages[seq.num_table_pages :]
                seq.num_table_pages = len(seq.pages)
            rows.append(seq.row)
        return rows

    def _to_batch(
        self, ints64: np.ndarray, ints32: np.ndarray, query_lens: list[int], seq_lens: list[int]
    ) -> ForwardBatch:
        device = self.model.device
        wide_tensor, narrow_tensor = torch.from_numpy(ints64), torch.from_numpy(ints32)
        if device.type != "cpu":
            wide_tensor = wide_tensor.to(device, non_blocking=True)
            narrow_tensor = narrow_tensor.to(device, non_blocking=True)
        num_tokens, num_chunks = sum(query_lens), len(query_lens)
        return ForwardBatch(
            input_ids_T=wide_tensor[:num_tokens],
            positions_T=wide_tensor[num_tokens : 2 * num_tokens],
            slots_T=wide_tensor[2 * num_tokens : 3 * num_tokens],
            query_start_B1=narrow_tensor[: num_chunks + 1],
            seq_lens_B=narrow_tensor[num_chunks + 1 : 2 * num_chunks + 1],
            page_table_BP=narrow_tensor[2 * num_chunks + 1 :].view(num_chunks, -1),
            logit_rows_R=wide_tensor[3 * num_tokens :],
            query_lens=tuple(query_lens),
            seq_lens=tuple(seq_lens),
            page_size=self.page_size,
        )


def _last_rows(query_ends: np.ndarray, num_rows: list[int]) -> np.ndarray:
    """Rows of T: of each chunk, ending at `query_ends[b]`, the last `num_rows[b]`."""
    counts = np.array(num_rows)
    return np.arange(counts.sum()) + np.repeat(query_ends - np.cumsum(counts), counts)
