"""Attention with sinks over packed documents: a dense form for any device, a flex form for GPUs, a cache for writing.

Each class gives the attention of a layer: attends(layer)(query, key, value, sinks); families without sinks give None.
A sink is one more logit per head in the softmax whose value is zero: out = plain * sigmoid(lse - sink).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

# attend(query BQLD, key BGLD, value BGLV, sinks Q or None) -> BQLV, of one layer
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class AttendShape(Protocol):
    """What attention needs to know of a model."""

    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def scale(self) -> float:
        """Of the scores."""

    @property
    def window(self) -> int:
        """Of the layers that slide; 0 where none does."""

    def slides(self, layer: int) -> bool: ...


def with_sinks(scores_BQLS: Tensor, mask: Tensor, value_BQSD: Tensor, sinks_Q: Tensor | None) -> Tensor:
    """Softmax over the visible keys and the sink, if there is one; scores are scaled already."""
    scores = scores_BQLS.float().masked_fill(~mask, float("-inf"))
    if sinks_Q is None:
        return scores.softmax(-1).to(value_BQSD.dtype) @ value_BQSD
    sink = sinks_Q.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    return weights.to(value_BQSD.dtype) @ value_BQSD


def repeated(x_BGSD: Tensor, times: int) -> Tensor:
    return x_BGSD.repeat_interleave(times, dim=1)


class DenseAttend:
    """Packed documents with a full score matrix. docs_BL numbers the documents; tokens see their own one only."""

    def __init__(self, shape: AttendShape, docs_BL: Tensor) -> None:
        self._shape = shape
        distance = torch.arange(docs_BL.shape[1], device=docs_BL.device)
        distance = distance[:, None] - distance[None, :]
        same = docs_BL[:, None, :, None] == docs_BL[:, None, None, :]
        self._full = same & (distance >= 0)
        self._window = self._full & (distance < shape.window) if shape.window else self._full

    def __call__(self, layer: int) -> Attend:
        return partial(self._attend, self._window if self._shape.slides(layer) else self._full)

    def _attend(self, mask: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        times = self._shape.heads // self._shape.kv_heads
        scores = query @ repeated(key, times).transpose(-1, -2) * self._shape.scale
        return with_sinks(scores, mask, repeated(value, times), sinks)


class FlexLayer:
    """One layer's attention for GPUs: flex attention skips blocks of other documents and outside the window."""

    def __init__(self, mask: BlockMask, scale: float) -> None:
        self._mask, self._scale = mask, scale

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        if sinks is None:
            plain: Tensor = flex_attention(query, key, value, block_mask=self._mask, scale=self._scale, enable_gqa=True)
            return plain
        out, aux = flex_attention(
            query, key, value, block_mask=self._mask, scale=self._scale, enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        return out * torch.sigmoid(aux.lse - sinks[None, :, None])[..., None].to(out.dtype)


class FlexAttend:
    """Packed documents like DenseAttend; `make_mask` is create_block_mask, or that compiled."""

    def __init__(
        self, shape: AttendShape, docs_BL: Tensor, make_mask: Callable[..., BlockMask] = create_block_mask
    ) -> None:
        batch, length = docs_BL.shape
        size = shape.window

        def full(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (docs_BL[b, q] == docs_BL[b, k]) & (q >= k)

        def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (docs_BL[b, q] == docs_BL[b, k]) & (q >= k) & (q - k < size)

        self._shape = shape
        make = partial(make_mask, B=batch, H=None, Q_LEN=length, KV_LEN=length, device=docs_BL.device)
        self._full = FlexLayer(make(full), shape.scale)
        self._window = FlexLayer(make(window), shape.scale) if size else self._full

    def __call__(self, layer: int) -> Attend:
        return self._window if self._shape.slides(layer) else self._full


class CachedAttend:
    """Keys and values of rows that write one token at a time, each at its own position."""

    def __init__(
        self, shape: AttendShape, rows: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self._shape = shape
        size = (shape.layers, rows, shape.kv_heads, capacity)
        self._keys = torch.zeros(*size, shape.key_dim, device=device, dtype=dtype)
        self._values = torch.zeros(*size, shape.value_dim, device=device, dtype=dtype)
        self.positions_BL = torch.zeros(rows, 1, dtype=torch.long, device=device)

    def keep(self, rows: Tensor) -> None:
        """Drops the rows that are done."""
        self._keys, self._values = self._keys[:, rows], self._values[:, rows]

    def __call__(self, layer: int) -> Attend:
        return partial(self._attend, layer)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        at = self.positions_BL[:, None, :, None]
        keys.scatter_(2, at.expand_as(key), key)
        values.scatter_(2, at.expand_as(value), value)
        used = int(self.positions_BL.max()) + 1
        times = self._shape.heads // self._shape.kv_heads
        scores = query @ repeated(keys[:, :, :used], times).transpose(-1, -2) * self._shape.scale
        distance = self.positions_BL[:, None, :, None] - torch.arange(used, device=query.device)
        mask = distance >= 0
        if self._shape.slides(layer):
            mask &= distance < self._shape.window
        return with_sinks(scores, mask, repeated(values[:, :, :used], times), sinks)
