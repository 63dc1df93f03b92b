"""Attention in plain torch on any device: batched decode, and prefill one block of queries at a time.

Keys of a request are gathered from its pages into one tensor per decode group or query block; which slots those are,
and what is masked, is worked out once per step in `TorchPlan`. A decode group gathers them head by head, so that one
batched product serves all its requests and heads (`decode_keys`). An FP8 cache is widened to the dtype of the queries
as it is gathered.

Shape letters: T tokens, B requests, Q queries of a block, H query heads, G KV heads, N = B * G pairs of a request and a
KV head, R query heads per KV head, P pages, S slots of all pages, L keys, C keys and the sink, D key dim, V value dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from model.attention.base import BF16, Attention, AttentionDtypes, AttentionSpec, register_attention
from model.attention.decode_keys import DecodeGroup, DecodeHistory, StepKeys, additive, decode_group, gather, indexable
from model.batch import ForwardBatch, LayerKv
from model.rope import rotate_
from moe.device import as_dtype

_MAX_DECODE_KEYS = 1 << 19  # gathered keys of one decode group, padding included
_MAX_SCORES = 1 << 24  # scores of one query block, all heads
_MAX_QUERY_BLOCK = 512
_E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Consecutive tokens of one request: rows `start:stop` of T."""

    start: int
    stop: int
    slots_L: torch.Tensor
    mask_QL: torch.Tensor


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Per kind of layer the slots to write, and what to read: `kept` of the kinds whose keys are kept, or the rest."""

    slots: dict[AttentionSpec, torch.Tensor]
    kept: dict[AttentionSpec, StepKeys]
    groups: dict[AttentionSpec, list[DecodeGroup]]
    blocks: dict[AttentionSpec, list[QueryBlock]]


@register_attention
class TorchAttention(Attention):
    """Serves every kind of layer, on CPUs and GPUs."""

    name = "torch"

    def __init__(self, specs: Sequence[AttentionSpec], device: torch.device, dtypes: AttentionDtypes = BF16) -> None:
        super().__init__(specs, device, dtypes)
        self._history = DecodeHistory()

    def plan(self, batch: ForwardBatch) -> TorchPlan:
        """Gather indices and masks of every kind of layer."""
        batches = {spec: batch.for_window(spec.window) for spec in self.specs}
        members = _decode_members(batch)
        kept = self._history.next_step(batches if members == [None] and self._can_keep else {})
        gathered = {spec: its_batch for spec, its_batch in batches.items() if spec not in kept}
        groups = {s: [decode_group(its_batch, s, chosen) for chosen in members] for s, its_batch in gathered.items()}
        blocks = {s: [] if batch.is_decode else list(_query_blocks(its_batch, s)) for s, its_batch in gathered.items()}
        return TorchPlan({spec: its_batch.slots_T for spec, its_batch in batches.items()}, kept, groups, blocks)

    def run(
        self,
        spec: AttentionSpec,
        plan: TorchPlan,
        kv: LayerKv,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGV: torch.Tensor | None,
        sinks_H: torch.Tensor | None,
        rotation_T1D: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the base class."""
        if rotation_T1D is not None:
            rotate_(q_THD, rotation_T1D)
            rotate_(k_TGD, rotation_T1D)
        slots_T = plan.slots[spec]
        k_TGD = _store(kv.keys, slots_T, k_TGD)
        if v_TGV is not None:
            v_TGV = _store(kv.values, slots_T, v_TGV)
        if (kept := plan.kept.get(spec)) is not None:
            keys_NLD, values_NLV = kept.of_layer(kv, k_TGD, v_TGV, q_THD.dtype)
            return _attend(spec, q_THD, keys_NLD, values_NLV, kept.mask_N1L, sinks_H)
        groups, blocks = plan.groups[spec], plan.blocks[spec]
        if len(groups) == 1 and groups[0].rows is None:
            return _run_group(spec, groups[0], kv, q_THD, sinks_H)
        out_THV = q_THD.new_empty(q_THD.shape[0], spec.num_heads, spec.value_dim)
        for group in groups:
            rows = slice(None) if group.rows is None else group.rows
            out_THV[rows] = _run_group(spec, group, kv, q_THD[rows], sinks_H)
        for block in blocks:
            out_THV[block.start : block.stop] = _run_block(spec, block, kv, q_THD[block.start : block.stop], sinks_H)
        return out_THV

    @property
    def _can_keep(self) -> bool:
        """Whether decode steps may keep their keys: on a CPU, in fp32.

        Kept keys have gaps between requests, which oneDNN's fast product of bf16 does not allow.
        """
        return self.device.type == "cpu" and self.dtypes.model == torch.float32


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


def _query_blocks(batch: ForwardBatch, spec: AttentionSpec) -> Iterator[QueryBlock]:
    """Blocks of every request with more than one token."""
    device = batch.slots_T.device
    row = 0
    for b, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        if query_len > 1:
            num_keys = min(seq_len, spec.window + _MAX_QUERY_BLOCK) if spec.window else seq_len
            size = min(_MAX_QUERY_BLOCK, max(1, _MAX_SCORES // (spec.num_heads * num_keys)))
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
                yield QueryBlock(row + first, row + last, slots_L, additive(is_visible_QL))
        row += query_len


def _store(cache: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`cache[slots] = x`, rounded; returns the rounded numbers. FP8 saturates, since torch would make NaN of what is
    out of its range.
    """
    if cache.dtype == torch.float8_e4m3fn:
        x = x.clamp(-_E4M3_MAX, _E4M3_MAX)
    x = as_dtype(x, cache.dtype)
    indexable(cache).index_copy_(0, slots, indexable(x))
    return x


def _run_group(
    spec: AttentionSpec, group: DecodeGroup, kv: LayerKv, q_BHD: torch.Tensor, sinks_H: torch.Tensor | None
) -> torch.Tensor:
    num_pairs = q_BHD.shape[0] * spec.num_kv_heads
    keys_NLD, values_NLV = gather(spec, kv, group.vectors_J, (num_pairs, group.num_keys), q_BHD.dtype)
    return _attend(spec, q_BHD, keys_NLD, values_NLV, group.mask_N1L, sinks_H)


def _attend(
    spec: AttentionSpec,
    q_BHD: torch.Tensor,
    keys_NLD: torch.Tensor,
    values_NLV: torch.Tensor,
    mask_N1L: torch.Tensor | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """[B, H, V] of requests with one query each."""
    num_requests, dtype = q_BHD.shape[0], q_BHD.dtype
    num_pairs, num_keys = keys_NLD.shape[:2]
    q_NRD = q_BHD.reshape(num_pairs, -1, spec.key_dim)
    beta = 0 if mask_N1L is None else 1  # with 0 the numbers of the mask are not read
    mask_N1L = q_BHD.new_empty(1) if mask_N1L is None else as_dtype(mask_N1L, dtype)
    scores_NRC = torch.baddbmm(mask_N1L, q_NRD, keys_NLD.transpose(1, 2), beta=beta, alpha=spec.scale)
    if sinks_H is not None:
        sinks_NR1 = as_dtype(sinks_H, dtype).expand(num_requests, -1).reshape(num_pairs, -1, 1)
        scores_NRC = torch.cat((scores_NRC, sinks_NR1), dim=-1)
    probs_NRL = as_dtype(torch.softmax(scores_NRC, dim=-1, dtype=torch.float32), dtype)[..., :num_keys]
    return torch.bmm(probs_NRL, values_NLV).view(num_requests, spec.num_heads, spec.value_dim)


def _run_block(
    spec: AttentionSpec, block: QueryBlock, kv: LayerKv, q_QHD: torch.Tensor, sinks_H: torch.Tensor | None
) -> torch.Tensor:
    num_queries, num_keys = block.mask_QL.shape
    keys_LGD, values_LGV = gather(spec, kv, block.slots_L, (num_keys, spec.num_kv_heads), q_QHD.dtype)
    # Heads first: head h = g * R + r, so the R queries that share KV head g are neighbours.
    q_GND = (q_QHD.transpose(0, 1) * spec.scale).reshape(spec.num_kv_heads, -1, spec.key_dim)
    scores_HQL = torch.bmm(q_GND, keys_LGD.permute(1, 2, 0)).view(spec.num_heads, num_queries, num_keys)
    scores_HQL += block.mask_QL
    if sinks_H is not None:
        scores_HQL = torch.cat((scores_HQL, sinks_H.view(-1, 1, 1).expand(-1, num_queries, 1).to(q_QHD.dtype)), dim=-1)
    probs_HQL = torch.softmax(scores_HQL, dim=-1, dtype=torch.float32).to(q_QHD.dtype)[..., :num_keys]
    probs_GNL = probs_HQL.reshape(spec.num_kv_heads, -1, num_keys)
    return torch.bmm(probs_GNL, values_LGV.transpose(0, 1)).view(spec.num_heads, num_queries, -1).transpose(0, 1)
