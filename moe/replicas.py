"""Routed experts to the slots that hold them, and counts of tokens per expert, in plain torch.

`moe.kernels.replicas` does the same on a GPU, inside captured graphs.
Shape letters: T tokens, K top-k, E experts, C rows of a table.
"""

from dataclasses import dataclass

import torch

from moe.placement import MOST_REPLICAS, Placement
from moe.routing import StandardTopK, drop_padding

NUM_ROWS = MOST_REPLICAS  # C: divisible by most numbers of replicas, so that each gets an equal share


@dataclass(frozen=True, slots=True)
class ExpertTables:
    """What one layer does with routed ids; a None leaves its part out.

    load_E: int64 [E], grows by the tokens of each expert. slots_CE: int32 [C, E], the slot of expert e for a token t is
    in row t % C. Both keep their addresses for as long as the model lives: captured graphs hold them.
    """

    load_E: torch.Tensor | None = None
    slots_CE: torch.Tensor | None = None


NO_TABLES = ExpertTables()


def slot_table(placement: Placement, num_experts: int, *, first_row: int = 0) -> torch.Tensor:
    """int32 [C, E]: an expert's replicas in turn, so that neighbouring tokens go to different ones.

    `first_row` differs between ranks whose tokens are their own, lest all their first tokens meet at one replica. Ranks
    that have the same tokens need the same table.
    """
    slots = placement.slots_of(num_experts)
    return torch.tensor(
        [[own[(row + first_row + expert) % len(own)] for expert, own in enumerate(slots)] for row in range(NUM_ROWS)],
        dtype=torch.int32,
    )


def count_and_place(
    topk: StandardTopK, tables: ExpertTables, num_live: torch.Tensor | None = None, first_token: int = 0
) -> StandardTopK:
    """The routing with slots in place of experts, after counting.

    `num_live` (int32 [1], on the device): tokens of the step that are not padding; None for all. `first_token`: the
    place in the step of the first token here. An id of -1 stays and counts for nobody.
    """
    ids_TK = topk.ids
    if tables.load_E is not None:
        counted = topk if num_live is None else drop_padding(topk, num_live, first_token)
        is_counted_TK = counted.ids >= 0
        tables.load_E.scatter_add_(0, ids_TK.clamp_min(0).flatten().long(), is_counted_TK.flatten().long())
    if tables.slots_CE is None:
        return topk
    rows_T1 = torch.arange(ids_TK.shape[0], device=ids_TK.device)[:, None] % NUM_ROWS
    slots_TK = tables.slots_CE[rows_T1, ids_TK.clamp_min(0).long()]
    return StandardTopK(topk.weights, torch.where(ids_TK < 0, -1, slots_TK))
