"""Helpers: a paged cache with shuffled pages, and batches over it, as the engine would build them."""

from dataclasses import dataclass, field

import torch

from model.batch import ForwardBatch, KvLayerSpec, LayerKv
from model.decoder import Model

PAGE_SIZE = 16


def run(model: Model, batch: ForwardBatch, kv: list[LayerKv]) -> torch.Tensor:
    """Plan and forward pass, as the engine runs them."""
    logits: torch.Tensor = model(batch, model.plan(batch), kv)
    return logits


@dataclass
class PagedCache:
    """Hands out pages in random order; unused slots hold NaN, so that reading one shows."""

    specs: list[KvLayerSpec]
    num_pages: int = 64
    seed: int = 0
    dtype: torch.dtype = torch.float32
    page_size: int = PAGE_SIZE
    layers: list[LayerKv] = field(init=False)

    def __post_init__(self) -> None:
        order = torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(self.seed))
        self.free = order.tolist()
        self.pages: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        num_slots = self.num_pages * self.page_size

        def empty(num_heads: int, dim: int) -> torch.Tensor:
            return torch.full((num_slots, num_heads, dim), float("nan"), dtype=self.dtype)

        self.layers = [
            LayerKv(empty(spec.num_heads, spec.key_dim), empty(spec.num_heads, spec.value_dim)) for spec in self.specs
        ]

    def batch(self, tokens: dict[str, list[int]], *, all_logits: bool = False) -> ForwardBatch:
        """Next tokens of each named request, appended to what it has; logits of the last one, or of all."""
        positions, slots, query_lens, seq_lens, tables = [], [], [], [], []
        for name, ids in tokens.items():
            start = self.lengths.get(name, 0)
            end = self.lengths[name] = start + len(ids)
            pages = self.pages.setdefault(name, [])
            while len(pages) * self.page_size < end:
                pages.append(self.free.pop())
            positions += range(start, end)
            slots += [pages[p // self.page_size] * self.page_size + p % self.page_size for p in range(start, end)]
            query_lens.append(len(ids))
            seq_lens.append(end)
            tables.append(pages)
        longest = max(len(pages) for pages in tables)
        ends = torch.tensor(query_lens).cumsum(0)
        num_tokens = int(ends[-1])
        return ForwardBatch(
            input_ids_T=torch.tensor([i for ids in tokens.values() for i in ids]),
            positions_T=torch.tensor(positions),
            slots_T=torch.tensor(slots),
            query_start_B1=torch.cat((torch.zeros(1), ends)).int(),
            seq_lens_B=torch.tensor(seq_lens).int(),
            page_table_BP=torch.tensor([pages + [0] * (longest - len(pages)) for pages in tables]).int(),
            logit_rows_R=torch.arange(num_tokens) if all_logits else ends - 1,
            query_lens=tuple(query_lens),
            seq_lens=tuple(seq_lens),
            page_size=self.page_size,
        )
