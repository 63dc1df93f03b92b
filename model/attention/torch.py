"""Attention in plain torch on any device: batched decode, and prefill one block of queries at a time.

Keys of a request are gathered from its pages into one tensor per decode group or query block; which slots those are,
and what is masked, is worked out once per step in `TorchPlan`. A decode group gathers them head by head, so that one
batched product serves all its requests and heads. Padded positions of a short request repeat its own last
key and are masked, so that whatever an unused slot holds (NaN included) never enters a product. An FP8 cache is widened
to the dtype of the queries as it is gathered.

Shape letters: T tokens, B requests, Q queries of a block, H query heads, G KV heads, N = B * G pairs of a request and a
KV head, R query heads per KV head, P pages, S slots of all pages, L keys, C keys and the sink, D key dim, V value dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from model.attention.base import Attention, AttentionSpec, register_attention
from model.batch import ForwardBatch, LayerKv
from model.rope import rotate_
from moe.device import as_dtype

_MAX_DECODE_KEYS = 1 << 19  # gathered keys of one decode group, padding included
_MAX_SCORES = 1 << 24  # scores of one query block, all heads
_MAX_QUERY_BLOCK = 512
_E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests with one token each. `rows` are their rows of T, None for all of them in order.

    `vectors_J`, J = N * L, says where the keys are that they see: it numbers the cache's vectors, G in each slot.
    """

    rows: torch.Tensor | None
    vectors_J: torch.Tensor
    num_keys: int
    mask_N1L: torch.Tensor | None  # 0 or -inf; None when all requests see L keys


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Consecutive tokens of one request: rows `start:stop` of T."""

    start: int
    stop: int
    slots_L: torch.Tensor
    mask_QL: torch.Tensor


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Per kind of layer the slots to write, and what to read."""

    slots: dict[AttentionSpec, torch.Tensor]
    groups: dict[AttentionSpec, list[DecodeGroup]]
    blocks: dict[AttentionSpec, list[QueryBlock]]


@register_attention
class TorchAttention(Attention):
    """Serves every kind of layer, on CPUs and GPUs."""

    name = "torch"

    def plan(self, batch: ForwardBatch) -> TorchPlan:
        """Gather indices and masks of every kind of layer."""
        batches = {spec: batch.for_window(spec.window) for spec in self.specs}
        members = _decode_members(batch)
        groups = {
            spec: [_decode_group(its_batch, spec, chosen) for chosen in members] for spec, its_batch in batches.items()
        }
        blocks = {s: [] if batch.is_decode else list(_query_blocks(its_batch, s)) for s, its_batch in batches.items()}
        return TorchPlan({spec: its_batch.slots_T for spec, its_batch in batches.items()}, groups, blocks)

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
        _store(kv.keys, plan.slots[spec], k_TGD)
        if v_TGV is not None:
            _store(kv.values, plan.slots[spec], v_TGV)
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
    """The keys that the members see (None: every request), those of a KV head next to each other."""
    device, num_heads, seq_lens = batch.slots_T.device, spec.num_kv_heads, batch.seq_lens
    table_BP, lens_B, rows = batch.page_table_BP, batch.seq_lens_B, None
    if members is not None:
        chosen = torch.tensor(members, device=device)
        rows = batch.query_start_B1[chosen].long()
        table_BP, lens_B = table_BP[chosen], lens_B[chosen]
        seq_lens = tuple(seq_lens[b] for b in members)
    longest, page_size = max(seq_lens), batch.page_size
    num_keys = longest if spec.window is None else min(spec.window, longest)
    first_page = max(0, min(seq_lens) - num_keys) // page_size  # those before are below every window
    first_slots_BP1 = table_BP[:, first_page : -(-longest // page_size)].long()[:, :, None] * page_size
    slots_BS = (first_slots_BP1 + torch.arange(page_size, device=device)).flatten(1)
    first_position = first_page * page_size
    mask_N1L = None
    if min(seq_lens) == longest:
        end = longest - first_position
        slots_BL = slots_BS[:, end - num_keys : end]
    else:
        lens_B1 = lens_B.long()[:, None]
        positions_BL = (lens_B1 - num_keys).clamp_min_(0) + torch.arange(num_keys, device=device)
        mask_N1L = _additive(positions_BL < lens_B1).repeat_interleave(num_heads, 0)[:, None]
        slots_BL = slots_BS.gather(1, positions_BL.minimum(lens_B1 - 1) - first_position)
    vectors_BGL = slots_BL[:, None] * num_heads + torch.arange(num_heads, device=device)[:, None]
    return DecodeGroup(rows, vectors_BGL.flatten(), num_keys, mask_N1L)


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
                yield QueryBlock(row + first, row + last, slots_L, _additive(is_visible_QL))
        row += query_len


def _additive(is_visible: torch.Tensor) -> torch.Tensor:
    """0 where visible, -inf elsewhere."""
    return torch.zeros(is_visible.shape, device=is_visible.device).masked_fill_(~is_visible, float("-inf"))


def _gather(
    spec: AttentionSpec, kv: LayerKv, rows: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [*shape, D] and values [*shape, V]. `rows` numbers the cache's slots, or its vectors, if there are as many
    rows as vectors in `shape`.
    """
    num_heads = shape[0] * shape[1] // rows.shape[0]  # of a row
    keys = _rows(kv.keys, num_heads * spec.key_dim, rows, dtype).view(*shape, spec.key_dim)
    if spec.values_in_keys:
        return keys, keys[..., : spec.value_dim]
    return keys, _rows(kv.values, num_heads * spec.value_dim, rows, dtype).view(*shape, spec.value_dim)


def _rows(cache: torch.Tensor, width: int, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of the cache, seen as a matrix: `index_select` on a matrix is several times faster than on anything else."""
    chosen = _indexable(cache).view(-1, width).index_select(0, rows)
    return as_dtype(chosen.view(cache.dtype) if cache.dtype == torch.float8_e4m3fn else chosen, dtype)


def _store(cache: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> None:
    """`cache[slots] = x`, rounded; FP8 saturates, since torch would make NaN of what is out of its range."""
    if cache.dtype == torch.float8_e4m3fn:
        x = x.clamp(-_E4M3_MAX, _E4M3_MAX)
    _indexable(cache).index_copy_(0, slots, _indexable(as_dtype(x, cache.dtype)))


def _indexable(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, FP8 as bytes: torch does not index it on every device."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _run_group(
    spec: AttentionSpec, group: DecodeGroup, kv: LayerKv, q_BHD: torch.Tensor, sinks_H: torch.Tensor | None
) -> torch.Tensor:
    num_requests, num_keys, dtype = q_BHD.shape[0], group.num_keys, q_BHD.dtype
    num_pairs = num_requests * spec.num_kv_heads
    keys_NLD, values_NLV = _gather(spec, kv, group.vectors_J, (num_pairs, num_keys), dtype)
    q_NRD = q_BHD.reshape(num_pairs, -1, spec.key_dim)
    mask_N1L = q_BHD.new_empty(1) if group.mask_N1L is None else as_dtype(group.mask_N1L, dtype)
    beta = 0 if group.mask_N1L is None else 1  # with 0 the numbers of the mask are not read
    scores_NRL = torch.baddbmm(mask_N1L, q_NRD, keys_NLD.transpose(1, 2), beta=beta, alpha=spec.scale)
    scores_BHC = scores_NRL.view(num_requests, spec.num_heads, num_keys)
    if sinks_H is not None:
        sinks_BH1 = as_dtype(sinks_H, dtype).view(1, -1, 1).expand(num_requests, -1, 1)
        scores_BHC = torch.cat((scores_BHC, sinks_BH1), dim=-1)
    probs_BHL = as_dtype(torch.softmax(scores_BHC, dim=-1, dtype=torch.float32), dtype)[..., :num_keys]
    probs_NRL = probs_BHL.view(num_pairs, -1, num_keys)
    return torch.bmm(probs_NRL, values_NLV).view(num_requests, spec.num_heads, spec.value_dim)


def _run_block(
    spec: AttentionSpec, block: QueryBlock, kv: LayerKv, q_QHD: torch.Tensor, sinks_H: torch.Tensor | None
) -> torch.Tensor:
    num_queries, num_keys = block.mask_QL.shape
    keys_LGD, values_LGV = _gather(spec, kv, block.slots_L, (num_keys, spec.num_kv_heads), q_QHD.dtype)
    # Heads first: head h = g * R + r, so the R queries that share KV head g are neighbours.
    q_GND = (q_QHD.transpose(0, 1) * spec.scale).reshape(spec.num_kv_heads, -1, spec.key_dim)
    scores_HQL = torch.bmm(q_GND, keys_LGD.permute(1, 2, 0)).view(spec.num_heads, num_queries, num_keys)
    scores_HQL += block.mask_QL
    if sinks_H is not None:
        scores_HQL = torch.cat((scores_HQL, sinks_H.view(-1, 1, 1).expand(-1, num_queries, 1).to(q_QHD.dtype)), dim=-1)
    probs_HQL = torch.softmax(scores_HQL, dim=-1, dtype=torch.float32).to(q_QHD.dtype)[..., :num_keys]
    probs_GNL = probs_HQL.reshape(spec.num_kv_heads, -1, num_keys)
    return torch.bmm(probs_GNL, values_LGV.transpose(0, 1)).view(spec.num_heads, num_queries, -1).transpose(0, 1)
