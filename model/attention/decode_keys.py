"""Keys and values that decode steps of the torch attention read: gathered from the pages, and on a CPU kept gathered.

All requests of a group end in the same column, the last one. A request with fewer keys than columns repeats its first
key before it, masked, so that whatever an unused slot holds (NaN included) never enters a product.

Shape letters: B requests, G KV heads, N = B * G pairs of a request and a KV head, P pages, S slots, L keys, C columns
of kept keys, D key dim, V value dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from model.attention.base import AttentionSpec
from model.batch import ForwardBatch, LayerKv
from moe.device import as_dtype

_WORTH_KEEPING = 4  # steps in a row before keys are kept; if fewer follow, keeping takes longer than gathering
_ROOM = 64  # steps that append to kept keys before all are gathered again
_MAX_KEPT_BYTES = 1 << 28  # of all layers; those for which nothing is left gather in every step


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests with one token each. `rows` are their rows of the step's tokens, None for all of them in order.

    `vectors_J`, J = N * L, says where the keys are that they see: it numbers the cache's vectors, G in each slot.
    """

    rows: torch.Tensor | None
    vectors_J: torch.Tensor
    num_keys: int
    mask_N1L: torch.Tensor | None  # 0 or -inf; None when all requests see L keys


def decode_group(batch: ForwardBatch, spec: AttentionSpec, members: list[int] | None) -> DecodeGroup:
    """The keys that the members see (None: every request), those of a KV head next to each other."""
    device, num_heads, seq_lens = batch.slots_T.device, spec.num_kv_heads, batch.seq_lens
    table_BP, lens_B, rows = batch.page_table_BP, batch.seq_lens_B, None
    if members is not None:
        chosen = torch.tensor(members, device=device)
        rows = batch.query_start_B1[chosen].long()
        table_BP, lens_B = table_BP[chosen], lens_B[chosen]
        seq_lens = tuple(seq_lens[b] for b in members)
    longest, page_size = max(seq_lens), batch.page_size
    num_keys = _num_keys(spec, seq_lens)
    first_page = _first_page(spec, seq_lens, page_size)
    first_slots_BP1 = table_BP[:, first_page : -(-longest // page_size)].long()[:, :, None] * page_size
    slots_BS = (first_slots_BP1 + torch.arange(page_size, device=device)).flatten(1)
    first_position = first_page * page_size
    if min(seq_lens) == longest:
        end = longest - first_position
        slots_BL = slots_BS[:, end - num_keys : end]
    else:
        positions_BL = lens_B.long()[:, None] + torch.arange(-num_keys, 0, device=device)
        slots_BL = slots_BS.gather(1, positions_BL.clamp_min_(0) - first_position)
    vectors_BGL = slots_BL[:, None] * num_heads + torch.arange(num_heads, device=device)[:, None]
    mask_N1L = _hide_first(lens_B, num_keys, num_heads, num_keys) if min(seq_lens) < num_keys else None
    return DecodeGroup(rows, vectors_BGL.flatten(), num_keys, mask_N1L)


def _num_keys(spec: AttentionSpec, seq_lens: Sequence[int]) -> int:
    """L: of the request that sees most."""
    longest = max(seq_lens)
    return longest if spec.window is None else min(spec.window, longest)


def _first_page(spec: AttentionSpec, seq_lens: Sequence[int], page_size: int) -> int:
    """The first column of the page table that some request sees: those before are below every window."""
    return max(0, min(seq_lens) - _num_keys(spec, seq_lens)) // page_size


def _hide_first(lens_B: torch.Tensor, num_keys: int, num_heads: int, num_columns: int) -> torch.Tensor:
    """[N, 1, C] that hides the columns before each request's first key; the last of L keys is in column L - 1."""
    num_hidden_N11 = (num_keys - lens_B).repeat_interleave(num_heads)[:, None, None]
    return additive(torch.arange(num_columns, device=lens_B.device) >= num_hidden_N11)


def additive(is_visible: torch.Tensor) -> torch.Tensor:
    """0 where visible, -inf elsewhere."""
    return torch.zeros(is_visible.shape, device=is_visible.device).masked_fill_(~is_visible, float("-inf"))


def gather(
    spec: AttentionSpec, kv: LayerKv, rows: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [*shape, D] and values [*shape, V]. `rows` numbers the cache's slots, or its vectors, if there are as many
    rows as vectors in `shape`. An FP8 cache is widened to `dtype`.
    """
    num_heads = shape[0] * shape[1] // rows.shape[0]  # of a row
    keys = _rows(kv.keys, num_heads * spec.key_dim, rows, dtype).view(*shape, spec.key_dim)
    if spec.values_in_keys:
        return keys, keys[..., : spec.value_dim]
    return keys, _rows(kv.values, num_heads * spec.value_dim, rows, dtype).view(*shape, spec.value_dim)


def _rows(cache: torch.Tensor, width: int, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of the cache, seen as a matrix: `index_select` on a matrix is several times faster than on anything else."""
    chosen = indexable(cache).view(-1, width).index_select(0, rows)
    return as_dtype(chosen.view(cache.dtype) if cache.dtype == torch.float8_e4m3fn else chosen, dtype)


def indexable(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, FP8 as bytes: torch does not index it on every device."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


class _LayerColumns:
    """Kept keys and values of one layer, up to the column `end`; those after it are not yet written."""

    def __init__(self, kept: "KeptKeys", cache: torch.Tensor, num_requests: int, dtype: torch.dtype) -> None:
        spec = kept.spec
        self.cache = cache  # held, so that no other layer's cache gets its id
        self.end = 0
        shape = (num_requests, spec.num_kv_heads, kept.num_columns)
        if spec.values_in_keys:
            self.keys_BGCD = torch.empty(*shape, spec.key_dim, dtype=dtype)
            self.keys_NCD = self.keys_BGCD.flatten(0, 1)
            self.values_BGCV, self.values_NCV = None, self.keys_NCD[..., : spec.value_dim]
        else:
            # Columns lie last. That halves the time of the product with the queries on an Intel Xeon; an AMD EPYC takes
            # as long either way. Writing all columns, once in `_ROOM` steps, takes several times as long.
            keys_BGDC = torch.empty(*shape[:2], spec.key_dim, kept.num_columns, dtype=dtype)
            self.keys_BGCD = keys_BGDC.transpose(2, 3)
            self.keys_NCD = self.keys_BGCD.flatten(0, 1)
            self.values_BGCV = torch.empty(*shape, spec.value_dim, dtype=dtype)
            self.values_NCV = self.values_BGCV.flatten(0, 1)

    def fill(self, start: int, keys_NLD: torch.Tensor, values_NLV: torch.Tensor) -> None:
        """Write the columns from `start` on."""
        self.end = start + keys_NLD.shape[1]
        self.keys_NCD[:, start : self.end] = keys_NLD
        if self.values_BGCV is not None:
            self.values_NCV[:, start : self.end] = values_NLV

    def append(self, k_BGD: torch.Tensor, v_BGV: torch.Tensor | None) -> None:
        """Write the next column."""
        self.keys_BGCD.select(2, self.end).copy_(k_BGD)
        if self.values_BGCV is not None and v_BGV is not None:
            self.values_BGCV.select(2, self.end).copy_(v_BGV)
        self.end += 1


class KeptKeys:
    """The keys that the requests of consecutive decode steps see, for one kind of layer, with room for new ones.

    The first of the steps gathers them, and in each step that follows a layer appends one column.
    """

    def __init__(self, spec: AttentionSpec, batch: ForwardBatch, max_bytes: int) -> None:
        self.spec = spec
        num_requests, num_keys = len(batch.seq_lens), _num_keys(spec, batch.seq_lens)
        self.num_columns = num_keys + _ROOM
        self.layers: dict[int, _LayerColumns] = {}  # by the id of the layer's cache
        self._end = num_keys
        num_numbers = spec.key_dim if spec.values_in_keys else spec.key_dim + spec.value_dim  # of a column
        self._layer_bytes = num_requests * spec.num_kv_heads * self.num_columns * num_numbers * torch.float32.itemsize
        self._max_bytes = max_bytes
        self._first_visible = num_keys - min(batch.seq_lens)  # from this column on nothing is hidden
        self._mask_N1C = None
        if self._first_visible > 0:
            self._mask_N1C = _hide_first(batch.seq_lens_B, num_keys, spec.num_kv_heads, self.num_columns)

    @property
    def has_room_for_column(self) -> bool:
        """Whether another step may append its keys."""
        return self._end < self.num_columns

    @property
    def has_room_for_layer(self) -> bool:
        """Whether the keys of another layer may be kept."""
        return (len(self.layers) + 1) * self._layer_bytes <= self._max_bytes

    def add_column(self) -> None:
        """The next step follows: its keys are a column more."""
        self._end += 1

    def step(self, batch: ForwardBatch) -> "StepKeys":
        """What the step sees whose keys are in the last column."""
        end = self._end
        start = 0 if self.spec.window is None else max(0, end - self.spec.window)
        mask_N1C = self._mask_N1C if start < self._first_visible else None
        return StepKeys(self, batch, start, end, None if mask_N1C is None else mask_N1C[..., start:end])


class StepKeys:
    """Columns `start:end` of kept keys: those that one decode step sees."""

    def __init__(
        self, kept: KeptKeys, batch: ForwardBatch, start: int, end: int, mask_N1L: torch.Tensor | None
    ) -> None:
        self._kept, self._batch, self._start, self._end = kept, batch, start, end
        self.mask_N1L = mask_N1L

    @cached_property
    def _vectors_J(self) -> torch.Tensor:
        return decode_group(self._batch, self._kept.spec, None).vectors_J

    def of_layer(
        self, kv: LayerKv, k_BGD: torch.Tensor, v_BGV: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [N, L, D] and values [N, L, V] in `dtype`. `k` and `v` are what the step has written to the cache."""
        columns = self._kept.layers.get(id(kv.keys))
        if columns is not None and columns.end == self._end - 1:
            columns.append(k_BGD, v_BGV)
            seen = slice(self._start, self._end)
            return columns.keys_NCD[:, seen], columns.values_NCV[:, seen]
        keys_NLD, values_NLV = self._gather(kv, dtype)
        if columns is None and self._kept.has_room_for_layer:
            columns = _LayerColumns(self._kept, kv.keys, len(self._batch.seq_lens), dtype)
            self._kept.layers[id(kv.keys)] = columns
        if columns is not None:
            columns.fill(self._start, keys_NLD, values_NLV)
        return keys_NLD, values_NLV

    def _gather(self, kv: LayerKv, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (len(self._batch.seq_lens) * self._kept.spec.num_kv_heads, self._end - self._start)
        return gather(self._kept.spec, kv, self._vectors_J, shape, dtype)


class DecodeHistory:
    """Recognizes decode steps that follow each other, and keeps the keys of those that do so for a while.

    Every step has to be planned, in order, and to run before the next is planned: then a slot that a step has read
    changes only if its page does.
    """

    def __init__(self) -> None:
        self._last: dict[AttentionSpec, ForwardBatch] = {}
        self._num_following = 0
        self._kept: dict[AttentionSpec, KeptKeys] = {}

    def next_step(self, batches: dict[AttentionSpec, ForwardBatch]) -> dict[AttentionSpec, StepKeys]:
        """What a decode step sees of kept keys, by kind of layer; empty if it has to gather them.

        `batches` is the step as each kind of layer sees it, and empty for a step that keeps nothing.
        """
        last, self._last = self._last, batches
        follows = bool(last) and all(_follows(spec, last[spec], batch) for spec, batch in batches.items())
        self._num_following = self._num_following + 1 if follows else 0
        kept, self._kept = self._kept, {}
        if self._num_following < _WORTH_KEEPING:
            return {}
        for spec, batch in batches.items():
            keys = kept.get(spec)
            if keys is not None and keys.has_room_for_column:
                keys.add_column()
            else:
                keys = KeptKeys(spec, batch, _MAX_KEPT_BYTES // len(batches))
            self._kept[spec] = keys
        return {spec: keys.step(batches[spec]) for spec, keys in self._kept.items()}


def _follows(spec: AttentionSpec, last: ForwardBatch, batch: ForwardBatch) -> bool:
    """Whether the requests of a decode step are those of the last one: a key longer, in the same pages.

    Only pages that some request still sees have to be the same.
    """
    if batch.seq_lens != tuple([length + 1 for length in last.seq_lens]):
        return False
    first_page, num_pages = _first_page(spec, batch.seq_lens, batch.page_size), last.page_table_BP.shape[1]
    now_BP, then_BP = (b.page_table_BP[:, first_page:num_pages] for b in (batch, last))
    if torch.equal(now_BP, then_BP):
        return True
    starts_P = torch.arange(first_page, num_pages, device=then_BP.device) * batch.page_size
    is_padding_BP = starts_P >= last.seq_lens_B[:, None]
    return bool(((now_BP == then_BP) | is_padding_BP).all())
