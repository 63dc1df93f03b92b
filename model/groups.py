"""From a layout and the process group of all ranks to the groups that a model needs."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from model.errors import ModelSettingsError
from model.parallel import ParallelLayout
from moe.group import SINGLE_RANK, Group, RankGroups, TorchGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def make_groups(layout: ParallelLayout, world: "ProcessGroup | None") -> RankGroups:
    """The groups of this rank. All ranks of `world` call it together; `world` is torch's default group, or None for one
    rank.

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
    return RankGroups(
        world=world, tp=_own_group(layout.rank, tp_rows, world), dp=_own_group(layout.rank, dp_columns, world)
    )


def _own_group(rank: int, divisions: list[list[int]], world: "ProcessGroup") -> Group:
    """The group of the division that has this rank. torch wants every rank to take part in making every group."""
    if len(divisions) == 1:
        return TorchGroup(world)
    if len(divisions[0]) == 1:
        return SINGLE_RANK
    groups = [torch.distributed.new_group(ranks) for ranks in divisions]
    return TorchGroup(next(group for group, ranks in zip(groups, divisions, strict=True) if rank in ranks))
