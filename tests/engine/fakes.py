"""A model without weights whose logits depend on every key it reads back through the page table, and its engine."""

from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from model.batch import ForwardBatch, KvLayerSpec, LayerKv
from tests.tables import rows

_PRIME = 1_000_003


class FakeModel:
    """Keys hold the token id, values the position. The logits after a token are a hash of all (id, position) before it.

    A wrong slot, page, position, length or query row therefore changes the answer. Values are checked on the way: a
    key whose position is not its place in the sequence gives NaN logits.
    """

    def __init__(self, vocab_size=97, max_model_len=256, eos_token_ids=(0,), sharpness=3.0, nan_after=None):
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.sharpness = sharpness
        self.nan_after = nan_after  # a token id after which nothing but NaN comes
        self.raise_on = None  # a token id that makes the forward pass raise
        self.kv_specs = [KvLayerSpec(num_heads=1, key_dim=1, value_dim=1)] * 2
        self.moe_layers = []
        self.balance = None
        self.asks_num_live = False
        self.token_mail = None
        self.plans_by_tables = False
        self.can_compile_ahead = False
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.num_calls = 0
        self.largest_step = 0

    def prepare_replay(self) -> None:
        """Nothing to prepare."""

    def plan(self, batch: ForwardBatch) -> str:
        return "plan"

    def plan_for_graph(self, batch: ForwardBatch) -> str:
        return "plan"

    def update_plan(self, plan: str, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> None:
        """Reads lengths from the batch."""

    def __call__(self, batch: ForwardBatch, plan: str, kv: list[LayerKv]) -> torch.Tensor:
        assert plan == "plan"
        self.num_calls += 1
        self.largest_step = max(self.largest_step, batch.num_tokens)
        ids = batch.input_ids_T.numpy()
        if self.raise_on is not None and (ids == self.raise_on).any():
            raise RuntimeError(f"token {self.raise_on} is poison")
        for layer in kv:
            layer.keys[batch.slots_T, 0, 0] = batch.input_ids_T.to(layer.keys.dtype)
            layer.values[batch.slots_T, 0, 0] = batch.positions_T.to(layer.values.dtype)
        hashes = np.concatenate([self._hash_request(batch, kv, b) for b in range(len(batch.query_lens))])
        return torch.from_numpy(
            np.stack([self._logits(hashes[row]) for row in batch.logit_rows_R.tolist()])
            if len(batch.logit_rows_R)
            else np.zeros((0, self.vocab_size), np.float32)
        )

    def _hash_request(self, batch, kv, b):
        """For each query token of request b: (hash of everything up to it, True if the cache was in order)."""
        positions = np.arange(batch.seq_lens[b])
        pages = batch.page_table_BP[b].numpy()[positions // batch.page_size]
        slots = torch.from_numpy(pages.astype(np.int64) * batch.page_size + positions % batch.page_size)
        tokens, places = (part[slots, 0, 0].float().numpy() for part in (kv[-1].keys, kv[-1].values))
        start, end = batch.query_start_B1[b : b + 2].tolist()
        assert end - start == batch.query_lens[b]
        assert batch.seq_lens_B[b] == batch.seq_lens[b]
        queries = slice(len(positions) - batch.query_lens[b], None)
        bad = ~np.logical_and.accumulate(places == positions)[queries]
        if self.nan_after is not None:
            bad |= tokens[queries] == self.nan_after
        values = list(
            accumulate(tokens.tolist(), lambda value, token: (value * 31 + int(token) + 1) % _PRIME, initial=7)
        )
        return np.stack((np.array(values[1:][queries], dtype=np.int64), bad), axis=1)

    def _logits(self, state):
        value, bad = state
        if bad:
            return np.full(self.vocab_size, np.nan, np.float32)
        mixed = np.arange(self.vocab_size, dtype=np.uint64) + np.uint64(value) * np.uint64(self.vocab_size)
        mixed = (mixed ^ (mixed >> np.uint64(7))) * np.uint64(0x9E3779B97F4A7C15)
        return ((mixed >> np.uint64(40)).astype(np.float32) / 2**24 * self.sharpness * 4).astype(np.float32)


def fake_core(model=None, **settings):
    """EngineCore on a fake model; small pages and budgets so that every boundary is met."""
    settings = {"page_size": 4, "num_pages": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16} | settings
    return EngineCore(EngineConfig(model=Path("unused"), device="cpu", **settings), model or FakeModel())


in_both_orders = rows("make_core", partial(fake_core, overlap=False), partial(fake_core, overlap=True))
"""Runs a test with plain steps and with overlapped ones."""
