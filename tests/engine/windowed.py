"""A fake model with sliding layers, and a guard that poisons every page the moment it is free."""

import numpy as np
import torch

from engine.core import EngineCore
from engine.sequence import Chunk
from model.batch import ForwardBatch, KvLayerSpec, LayerKv
from tests.engine.fakes import FakeModel, fake_core

_PRIME = 1_000_003


class WindowedModel(FakeModel):
    """Two sliding layers and two full ones. The logits hash what a full layer sees and what a sliding one sees.

    `is_uniform`: the cache is told of no windows, so every layer keeps every page; the answers are the same.
    """

    def __init__(self, window=9, *, is_uniform=False, **options):
        super().__init__(**options)
        self.windows = [window, None, window, None]
        self.window = window
        told = [None if is_uniform else window for window in self.windows]
        self.kv_specs = [KvLayerSpec(num_heads=1, key_dim=1, value_dim=1, window=window) for window in told]

    def why_not_capturable(self, max_num_tokens):
        return None

    def __call__(self, batch: ForwardBatch, plan: str, kv: list[LayerKv]) -> torch.Tensor:
        self.num_calls += 1
        for layer, window in zip(kv, self.windows, strict=True):
            slots_T = batch.for_window(window).slots_T
            layer.keys[slots_T, 0, 0] = batch.input_ids_T.to(layer.keys.dtype)
            layer.values[slots_T, 0, 0] = batch.positions_T.to(layer.values.dtype)
        states = np.concatenate([self._states(batch, kv, b) for b in range(len(batch.query_lens))])
        chosen = [self._logits(states[row]) for row in batch.logit_rows_R.tolist()]
        return torch.from_numpy(np.stack(chosen) if chosen else np.zeros((0, self.vocab_size), np.float32))

    def _states(self, batch, kv, b):
        """Per query token of request b: a hash of all that it sees, and whether any of it was out of order."""
        end = batch.seq_lens[b]
        first_query = end - batch.query_lens[b]
        states = self._hash_request(batch, kv, b)
        first = max(0, first_query - self.window + 1)
        for layer in (kv[0], kv[2]):
            tokens, places = read(batch.for_window(self.window), layer, b, range(first, end))
            for index, query in enumerate(range(first_query, end)):
                seen = slice(max(0, query - self.window + 1) - first, query + 1 - first)
                if not np.array_equal(places[seen], np.arange(first + seen.start, query + 1)):
                    states[index] = states[index][0], True
                    continue
                value = int(states[index][0])
                for token in tokens[seen]:
                    value = (value * 37 + int(token) + 1) % _PRIME
                states[index][0] = value
        return states


def read(batch, layer, b, positions):
    """Keys and values of request b at the positions, through the page table."""
    positions = np.array(positions)
    pages = batch.page_table_BP[b].numpy()[positions // batch.page_size].astype(np.int64)
    slots = torch.from_numpy(pages * batch.page_size + positions % batch.page_size)
    return layer.keys[slots, 0, 0].numpy(), layer.values[slots, 0, 0].numpy()


class PoisonedPages:
    """Fills pages with NaN the moment they are free or reused, and raises if a launched step reads a page that slid."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.page_size = core, core._runner.page_size
        self.pages = core._scheduler.pages
        self.num_poisoned = self.num_slid = 0
        self._launched: list[list[Chunk]] = []
        self._release, self._forget = self.pages.release, self.pages.on_reuse
        self.pages.release, self.pages.on_reuse = self.release, self.reuse
        for layer in core._runner.kv:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
        executor, paging = core._executor, core._scheduler._paging
        launch, collect, commit = executor.launch, executor.collect, paging.commit

        def watched_launch(chunks):
            self._launched.append(chunks)
            return launch(chunks)

        def watched_collect(launched):
            self._launched = [chunks for chunks in self._launched if chunks is not launched.chunks]
            return collect(launched)

        def watched_commit(seq, num_written):
            before = seq.num_slid_pages
            gone = list(seq.sliding_pages)
            commit(seq, num_written)
            self.check(seq, set(gone[before : seq.num_slid_pages]))

        executor.launch, executor.collect, paging.commit = watched_launch, watched_collect, watched_commit

    def check(self, seq, slid):
        """No launched step of the request sees a page that went."""
        if not slid:
            return
        self.num_slid += len(slid)
        window = self.core._runner.model.window
        for chunk in (chunk for chunks in self._launched for chunk in chunks if chunk.seq is seq):
            first = max(0, chunk.start - window + 1) // self.page_size
            assert not slid & set(chunk.seq.sliding_pages[first:])
            assert chunk.seq.num_slid_pages <= first

    def release(self, pages):
        pages = list(pages)
        self._release(pages)
        for page in set(pages):
            if self.pages.num_references(page) == 0 and not self.pages._kept[page]:
                self.poison(page)

    def reuse(self, page):
        if self._forget is not None:
            self._forget(page)
        self.poison(page)

    def poison(self, page):
        self.num_poisoned += 1
        for layer in self.core._runner.kv:
            for tensor in (layer.keys, layer.values):
                tensor[page * self.page_size : (page + 1) * self.page_size] = float("nan")


def windowed_core(window=9, *, is_uniform=False, max_model_len=68, **settings):
    """An engine on a `WindowedModel`, and its `PoisonedPages`."""
    core = fake_core(WindowedModel(window, is_uniform=is_uniform, max_model_len=max_model_len), **settings)
    return core, PoisonedPages(core)
