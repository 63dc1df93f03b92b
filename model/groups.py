"""From a layout and the process group of all ranks to the groups that a model needs."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from model.errors import ModelSettingsError
from model.parallel import ParallelLayout
from moe.group import SINGLE_RANK, Group, RankGroups, TorchGroup
from moe.one_shot import with_one_shot

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def make_groups(
    layout: ParallelLayout, world: "ProcessGroup | None", one_shot_on: torch.device | None = None
) -> RankGroups:
    """The groups of this rank. All ranks of `world` call it together; `world` is torch's default group, or None for one
    rank. `one_shot_on`: the GPU on which small sums over `tp` may take one kernel; None leaves them to NCCL or gloo.

    Raises:
        ModelSettingsError: `world` is missing, or has another number of ranks than the layout.
    """
    if world is None:
        if layout.num_ranks > 1:
            raise ModelSettingsError(
                f"tensor_parallel_size {layout.tp_size} x data_parallel_size {layout.dp_size} needs a process group of "
                f"{layout.num_ranks} ranks, but this process runs alone"
            )
        return RankGroups()
    if world.size() != layout.num_ranks:
        raise ModelSettingsError(
            f"tensor_parallel_size {layout.tp_size} x data_parallel_size {layout.dp_size} are {layout.num_ranks} "
            f"ranks, but the process group has {world.size()}"
        )
    tp_rows = [replace(layout, rank=first).tp_ranks for first in range(0, layout.num_ranks, layout.tp_size)]
    dp_columns = [replace(layout, rank=first).dp_ranks for first in range(layout.tp_size)]
    tp, dp = (_own_group(layout.rank, division, world) for division in (tp_rows, dp_columns))
    if one_shot_on is not None and isinstance(tp, TorchGroup):
        tp = with_one_shot(tp, one_shot_on)
    return RankGroups(world=world, tp=tp, dp=dp)


def _own_group(rank: int, divisions: list[list[int]], world: "ProcessGroup") -> Group:
    """The group of the division that has this rank. torch wants every rank to take part in making every group."""
    if len(divisions) == 1:
        return TorchGroup(world)
    if len(divisions[0]) == 1:
        return SINGLE_RANK
    groups = [torch.distributed.new_group(ranks) for ranks in divisions]
    return TorchGroup(next(group for group, ranks in zip(groups, divisions, strict=True) if rank in ranks))
