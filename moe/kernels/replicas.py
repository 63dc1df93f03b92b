"""`moe.replicas.count_and_place` on a GPU, by one launch or inside the router's: atomic counts, a gather for the slot.

Shape letters: T tokens, K top-k, E experts, C rows of a table.
"""

# Device functions take tensors of the device, which have no Python type.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moe.kernels.compile_ahead import launch
from moe.kernels.pdl import pdl_options
from moe.replicas import NUM_ROWS, ExpertTables
from moe.routing import StandardTopK

_ROWS = tl.constexpr(NUM_ROWS)
_BLOCK = 256


@triton.jit
def place(
    ids, t, mask, counts_ptr, table_ptr, num_live, first_token,
    E: tl.constexpr, COUNTS: tl.constexpr, HAS_LIVE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The ids, or the slots, of the experts `ids` of tokens t; both of one shape. Counts those that are not padding."""
    is_expert = mask & (ids >= 0)
    if COUNTS:
        counted = is_expert
        if HAS_LIVE:
            counted = counted & (t + first_token < num_live)
        tl.atomic_add(counts_ptr + ids, tl.full(ids.shape, 1, tl.int64), mask=counted, sem="relaxed")
    if PLACES:
        ids = tl.load(table_ptr + (t % _ROWS) * E + ids, mask=is_expert, other=-1)
    return ids


@triton.jit(do_not_specialize=["num_slots", "first_token"])
def _place_all(
    ids_ptr, out_ptr, counts_ptr, table_ptr, live_ptr, num_slots, first_token, K: tl.constexpr, E: tl.constexpr,
    COUNTS: tl.constexpr, HAS_LIVE: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK of the T * K ids."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < num_slots
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    num_live = tl.load(live_ptr) if HAS_LIVE else 0
    ids = tl.load(ids_ptr + index, mask=mask, other=-1)
    ids = place(ids, index // K, mask, counts_ptr, table_ptr, num_live, first_token, E, COUNTS, HAS_LIVE, PLACES)
    if PLACES:
        tl.store(out_ptr + index, ids, mask=mask)


def table_arguments(tables: ExpertTables, num_live: torch.Tensor | None, unused: torch.Tensor) -> dict[str, object]:
    """Arguments of `place` by name. `unused`: any tensor of the device, in place of those that are not read."""
    load_E, slots_CE = tables.load_E, tables.slots_CE
    return {
        "counts_ptr": unused if load_E is None else load_E,
        "table_ptr": unused if slots_CE is None else slots_CE,
        "live_ptr": unused if num_live is None else num_live,
        "COUNTS": load_E is not None,
        "HAS_LIVE": load_E is not None and num_live is not None,
        "PLACES": slots_CE is not None,
    }


def count_and_place(
    topk: StandardTopK, tables: ExpertTables, num_live: torch.Tensor | None = None, first_token: int = 0
) -> StandardTopK:
    """As `moe.replicas.count_and_place`; ids are contiguous int32."""
    ids_TK = topk.ids
    num_slots = ids_TK.numel()
    if not num_slots or (tables.load_E is None and tables.slots_CE is None):
        return topk
    columns = tables.load_E if tables.slots_CE is None else tables.slots_CE[0]
    num_experts = 0 if columns is None else columns.shape[0]
    out_TK = ids_TK if tables.slots_CE is None else torch.empty_like(ids_TK)
    launch(_place_all, (triton.cdiv(num_slots, _BLOCK),))(
        ids_TK, out_TK, num_slots=num_slots, first_token=first_token, K=ids_TK.shape[1], E=num_experts, BLOCK=_BLOCK,
        **table_arguments(tables, num_live, ids_TK), **pdl_options(ids_TK.device),
    )  # fmt: skip
    return StandardTopK(topk.weights, out_TK)
