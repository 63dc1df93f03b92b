"""Attention with sinks over packed documents: a dense form for any device, a flex form for GPUs, a cache for writing.

A sink is one more logit per head in the softmax whose value is zero: out = plain * sigmoid(lse - sink).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tools.tiny_models.model import Shape


def with_sinks(scores_BQLS: Tensor, mask: Tensor, value_BQSD: Tensor, sinks_Q: Tensor) -> Tensor:
    """Softmax over the visible keys and the sink; scores are scaled already."""
    scores = scores_BQLS.float().masked_fill(~mask, float("-inf"))
    sink = sinks_Q.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return weights.to(value_BQSD.dtype) @ value_BQSD


def repeated(x_BGSD: Tensor, times: int) -> Tensor:
    return x_BGSD.repeat_interleave(times, dim=1)


class DenseAttend:
    """Packed documents with a full score matrix. docs_BL numbers the documents; tokens see their own one only."""

    def __init__(self, shape: Shape, docs_BL: Tensor) -> None:
        self._shape = shape
        distance = torch.arange(docs_BL.shape[1], device=docs_BL.device)
        distance = distance[:, None] - distance[None, :]
        same = docs_BL[:, None, :, None] == docs_BL[:, None, None, :]
        self._full = same & (distance >= 0)
        self._window = self._full & (distance < shape.window)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        times = self._shape.heads // self._shape.kv_heads
        scores = query @ repeated(key, times).transpose(-1, -2) * self._shape.head_dim**-0.5
        mask = self._window if self._shape.slides(layer) else self._full
        return with_sinks(scores, mask, repeated(value, times), sinks)


class FlexAttend:
    """The same for GPUs: flex attention skips blocks of other documents and outside the window."""

    def __init__(self, shape: Shape, masks: tuple[BlockMask, BlockMask]) -> None:
        self._shape = shape
        self._full, self._window = masks

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        mask = self._window if self._shape.slides(layer) else self._full
        scale = self._shape.head_dim**-0.5
        result: Any = flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=True, return_lse=True)
        out, lse = result
        return out * torch.sigmoid(lse - sinks[None, :, None])[..., None].to(out.dtype)


def flex_masks(shape: Shape, docs_BL: Tensor) -> tuple[BlockMask, BlockMask]:
    """Block masks for the full and the sliding layers of one batch."""
    batch, length = docs_BL.shape

    def full(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (docs_BL[b, q] == docs_BL[b, k]) & (q >= k)

    def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return full(b, h, q, k) & (q - k < shape.window)

    make = [create_block_mask(rule, batch, None, length, length, device=docs_BL.device) for rule in (full, window)]
    return make[0], make[1]


class CachedAttend:
    """Keys and values of rows that write one token at a time, each at its own position."""

    def __init__(self, shape: Shape, rows: int, capacity: int, device: torch.device | str, dtype: torch.dtype) -> None:
        self._shape = shape
        size = (shape.layers, rows, shape.kv_heads, capacity, shape.head_dim)
        self._keys = torch.zeros(size, device=device, dtype=dtype)
        self._values = torch.zeros(size, device=device, dtype=dtype)
        self.positions_BL = torch.zeros(rows, 1, dtype=torch.long, device=device)

    def keep(self, rows: Tensor) -> None:
        """Drops the rows that are done."""
        self._keys, self._values = self._keys[:, rows], self._values[:, rows]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        at = self.positions_BL[:, None, :, None].expand_as(key)
        keys.scatter_(2, at, key)
        values.scatter_(2, at, value)
        used = int(self.positions_BL.max()) + 1
        times = self._shape.heads // self._shape.kv_heads
        scores = query @ repeated(keys[:, :, :used], times).transpose(-1, -2) * self._shape.head_dim**-0.5
        distance = self.positions_BL[:, None, :, None] - torch.arange(used, device=query.device)
        mask = distance >= 0
        if self._shape.slides(layer):
            mask &= distance < self._shape.window
        return with_sinks(scores, mask, repeated(values[:, :, :used], times), sinks)
