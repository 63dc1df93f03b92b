"""Attention in plain torch on any device: batched decode, and prefill one block of queries at a time.

Keys of a request are gathered from its pages into one tensor per decode group or query block; which slots those are,
and what is masked, is worked out once per step in `TorchPlan`. Padded positions of a short request repeat its own last
key and are masked, so that whatever an unused slot holds (NaN included) never enters a product.

Shape letters: T tokens, B requests, H query heads, G KV heads, R query heads per KV head, L keys, D key dim, V value dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from model.attention.base import Attention, AttentionSpec, register_attention
from model.batch import ForwardBatch, LayerKv

_MAX_DECODE_KEYS = 1 << 19  # gathered keys of one decode group, padding included
_MAX_SCORES = 1 << 24  # scores of one query block, all heads
_MAX_QUERY_BLOCK = 512


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests with one token each. `rows` are their rows of T, None for all of them in order."""

    rows: torch.Tensor | None
    index_BGL: torch.Tensor  # flat: rows of the cache seen as [slots * G, D]
    mask_NL: torch.Tensor | None  # [B * G, 1, L], 0 or -inf; None when all requests have L keys
    num_requests: int
    num_keys: int


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Consecutive tokens of one request: rows `start:stop` of T."""

    start: int
    stop: int
    index_GL: torch.Tensor
    mask_QL: torch.Tensor


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Slots to write, and per kind of layer what to read."""

    slots_T: torch.Tensor
    groups: dict[AttentionSpec, list[DecodeGroup]]
    blocks: dict[AttentionSpec, list[QueryBlock]]


@register_attention
class TorchAttention(Attention):
    """Serves every kind of layer, on CPUs and GPUs."""

    name = "torch"

    def plan(self, batch: ForwardBatch) -> TorchPlan:
        """Gather indices and masks of every kind of layer."""
        groups = {spec: [_decode_group(batch, spec, members) for members in _decode_members(batch)] for spec in self.specs}
        if batch.is_decode:
            return TorchPlan(batch.slots_T, groups, {spec: [] for spec in self.specs})
        return TorchPlan(batch.slots_T, groups, {spec: list(_query_blocks(batch, spec)) for spec in self.specs})

    def run(
        self,
        spec: AttentionSpec,
        plan: TorchPlan,
        kv: LayerKv,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGV: torch.Tensor | None,
        sinks_H: torch.Tensor | None,
    ) -> torch.Tensor:
        """See the base class."""
        kv.keys.index_copy_(0, plan.slots_T, k_TGD.to(kv.keys.dtype))
        if v_TGV is not None:
            kv.values.index_copy_(0, plan.slots_T, v_TGV.to(kv.values.dtype))
        groups, blocks = plan.groups[spec], plan.blocks[spec]
        if len(groups) == 1 and groups[0].rows is None:
            return _run_group(spec, groups[0], kv, q_THD, sinks_H)
        out_THV = q_THD.new_empty(q_THD.shape[0], spec.num_heads, spec.value_dim)
        for group in groups:
            out_THV.index_copy_(0, group.rows, _run_group(spec, group, kv, q_THD[group.rows], sinks_H))
        for block in blocks:
            out_THV[block.start : block.stop] = _run_block(spec, block, kv, q_THD[block.start : block.stop], sinks_H)
        return out_THV


def _decode_members(batch: ForwardBatch) -> list[list[int] | None]:
    """Requests with one token, cut into groups whose padded keys stay within bounds; None stands for all requests."""
    if batch.is_decode and len(batch.seq_lens) * max(batch.seq_lens, default=0) <= _MAX_DECODE_KEYS:
        return [None] if batch.seq_lens else []
    single = [b for b, query_len in enumerate(batch.query_lens) if query_len == 1]
    single.sort(key=lambda b: -batch.seq_lens[b])  # neighbours of like length waste little padding
    members: list[list[int] | None] = []
    while single:
        size = max(1, _MAX_DECODE_KEYS // batch.seq_lens[single[0]])
        members.append(single[:size])
        single = single[size:]
    return members


def _decode_group(batch: ForwardBatch, spec: AttentionSpec, members: list[int] | None) -> DecodeGroup:
    device = batch.slots_T.device
    rows: torch.Tensor | None = None
    page_table_BP, lens_B = batch.page_table_BP, batch.seq_lens_B
    seq_lens = list(batch.seq_lens)
    if members is not None:
        chosen = torch.tensor(members, device=device)
        rows = batch.query_start_B1[chosen].long()
        page_table_BP, lens_B = page_table_BP[chosen], lens_B[chosen]
        seq_lens = [seq_lens[b] for b in members]
    num_keys = min(max(seq_lens), spec.window or max(seq_lens))
    offsets_L = torch.arange(num_keys, device=device)
    mask_NL = None
    if min(seq_lens) == max(seq_lens):
        positions_BL = (offsets_L + (seq_lens[0] - num_keys)).expand(len(seq_lens), num_keys)
    else:
        lens_B1 = lens_B.long()[:, None]
        positions_BL = (lens_B1 - num_keys).clamp_min_(0) + offsets_L
        mask_NL = _additive(positions_BL < lens_B1).repeat_interleave(spec.num_kv_heads, 0)[:, None]
        positions_BL = positions_BL.minimum(lens_B1 - 1)
    slots_BL = page_table_BP.long().gather(1, positions_BL // batch.page_size)
    slots_BL = slots_BL * batch.page_size + positions_BL % batch.page_size
    index_BGL = _head_rows(slots_BL, spec.num_kv_heads).flatten()
    return DecodeGroup(rows, index_BGL, mask_NL, len(seq_lens), num_keys)


def _query_blocks(batch: ForwardBatch, spec: AttentionSpec) -> Iterator[QueryBlock]:
    """Blocks of every request with more than one token."""
    device = batch.slots_T.device
    row = 0
    for b, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        if query_len > 1:
            size = min(_MAX_QUERY_BLOCK, max(1, _MAX_SCORES // (spec.num_heads * seq_len)))
            pages_P = batch.page_table_BP[b].long()
            for first in range(0, query_len, size):
                last = min(first + size, query_len)
                query_from, query_to = seq_len - query_len + first, seq_len - query_len + last
                key_from = max(0, query_from - spec.window + 1) if spec.window else 0
                keys_L = torch.arange(key_from, query_to, device=device)
                queries_Q1 = torch.arange(query_from, query_to, device=device)[:, None]
                is_visible_QL = keys_L <= queries_Q1
                if spec.window:
                    is_visible_QL &= queries_Q1 - keys_L < spec.window
                slots_L = pages_P[keys_L // batch.page_size] * batch.page_size + keys_L % batch.page_size
                index_GL = _head_rows(slots_L[None], spec.num_kv_heads).flatten()
                yield QueryBlock(row + first, row + last, index_GL, _additive(is_visible_QL))
        row += query_len


def _additive(is_visible: torch.Tensor) -> torch.Tensor:
    """0 where visible, -inf elsewhere."""
    return torch.zeros(is_visible.shape, device=is_visible.device).masked_fill_(~is_visible, float("-inf"))


def _head_rows(slots_BL: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[B, G, L] rows of the cache seen as [slots * G, dim]."""
    if num_heads == 1:
        return slots_BL[:, None]
    return slots_BL[:, None] * num_heads + torch.arange(num_heads, device=slots_BL.device)[:, None]


def _gather(
    spec: AttentionSpec, kv: LayerKv, index: torch.Tensor, num_keys: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [N, L, D] and values [N, L, V] of the indexed rows."""
    keys_NLD = kv.keys.view(-1, spec.key_dim).index_select(0, index).view(-1, num_keys, spec.key_dim).to(dtype)
    if spec.values_in_keys:
        return keys_NLD, keys_NLD[..., : spec.value_dim]
    values = kv.values.view(-1, spec.value_dim).index_select(0, index)
    return keys_NLD, values.view(-1, num_keys, spec.value_dim).to(dtype)


def _run_group(
    spec: AttentionSpec, group: DecodeGroup, kv: LayerKv, q_BHD: torch.Tensor, sinks_H: torch.Tensor | None
) -> torch.Tensor:
    keys_NLD, values_NLV = _gather(spec, kv, group.index_BGL, group.num_keys, q_BHD.dtype)
    q_NRD = q_BHD.reshape(keys_NLD.shape[0], -1, spec.key_dim)
    scores_NRL = torch.bmm(q_NRD, keys_NLD.mT).float() * spec.scale
    if group.mask_NL is not None:
        scores_NRL += group.mask_NL
    scores_BHL = scores_NRL.view(group.num_requests, spec.num_heads, group.num_keys)
    probs_BHL = _softmax(scores_BHL, None if sinks_H is None else sinks_H[:, None])
    probs_NRL = probs_BHL.view(keys_NLD.shape[0], -1, group.num_keys).to(q_BHD.dtype)
    return torch.bmm(probs_NRL, values_NLV).view(group.num_requests, spec.num_heads, spec.value_dim)


def _run_block(
    spec: AttentionSpec, block: QueryBlock, kv: LayerKv, q_QHD: torch.Tensor, sinks_H: torch.Tensor | None
) -> torch.Tensor:
    num_queries, num_keys = block.mask_QL.shape
    keys_GLD, values_GLV = _gather(spec, kv, block.index_GL, num_keys, q_QHD.dtype)
    # Heads first: head h = g * R + r, so the R queries that share KV head g are neighbours.
    q_GND = q_QHD.transpose(0, 1).reshape(spec.num_kv_heads, -1, spec.key_dim)
    scores_HQL = torch.bmm(q_GND, keys_GLD.mT).float().mul_(spec.scale).view(spec.num_heads, num_queries, num_keys)
    scores_HQL += block.mask_QL
    probs_HQL = _softmax(scores_HQL, None if sinks_H is None else sinks_H[:, None, None])
    probs_GNL = probs_HQL.reshape(spec.num_kv_heads, -1, num_keys).to(q_QHD.dtype)
    return torch.bmm(probs_GNL, values_GLV).view(spec.num_heads, num_queries, spec.value_dim).transpose(0, 1)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """fp32 softmax over the last axis; with sinks, one more logit that takes probability and gives no value."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    with_sink = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return torch.softmax(with_sink, dim=-1)[..., :-1]
