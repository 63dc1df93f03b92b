"""Counters of tokens by expert, and the experts that ranks exchange so that each of them gets as many tokens.

Shape letters: L MoE layers, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from model.errors import ModelSettingsError
from model.parallel import ParallelLayout
from moe.backend import Backend
from moe.group import SINGLE_RANK, Group, Parcel
from moe.placement import Move, Placement, check_slots, moves_between, plan_placement
from moe.replicas import ExpertTables, slot_table


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceSettings:
    """`counts`: whether tokens are counted by expert. `has_replicas`: whether experts have replicas, `num_redundant` of
    them in a layer (None: one for each expert-parallel rank); then tokens are counted, too.

    `load`: tokens of each expert in each MoE layer, from which the first placement is planned; None: all alike.
    """

    counts: bool = False
    has_replicas: bool = False
    num_redundant: int | None = None
    load: tuple[tuple[int, ...], ...] | None = None

    @property
    def is_counting(self) -> bool:
        """Whether there are counters."""
        return self.counts or self.has_replicas

    def check(self, layout: ParallelLayout) -> None:
        """Refuse replicas where one rank would hold them all.

        Raises:
            ModelSettingsError: says what would work.
        """
        if self.has_replicas and layout.ep_size == 1:
            raise ModelSettingsError(
                "enable_eplb is set, but expert_parallel_size is 1: every rank has a part of every expert, so there is "
                "nothing to balance; set expert_parallel_size, or leave enable_eplb off"
            )

    def slots_per_rank(self, num_experts: int, layout: ParallelLayout) -> int:
        """Experts of a layer that each expert-parallel rank holds, replicas included. Errors as `check_slots` says."""
        if not self.has_replicas:
            return num_experts // layout.ep_size
        num_redundant = layout.ep_size if self.num_redundant is None else self.num_redundant
        return check_slots(num_experts, num_redundant, layout.ep_size)

    def first_placements(self, num_layers: int, num_experts: int, layout: ParallelLayout) -> list[Placement]:
        """Of each MoE layer.

        Raises:
            ModelSettingsError: the recorded load is of another model.
        """
        if not self.has_replicas:
            ranks = [replace(layout.moe_place, ep_rank=rank) for rank in range(layout.ep_size)]
            return [Placement(tuple(tuple(rank.expert_range(num_experts)) for rank in ranks))] * num_layers
        load = self.load or ((1,) * num_experts,) * num_layers
        if len(load) != num_layers or any(len(row) != num_experts for row in load):
            raise ModelSettingsError(
                f"eplb_load has {len(load)} layers of {len(load[0]) if load else 0} experts, but this model has "
                f"{num_layers} of {num_experts}: record the load of this model"
            )
        slots_per_rank = self.slots_per_rank(num_experts, layout)
        return [plan_placement(row, layout.ep_size, slots_per_rank) for row in load]


@dataclass(slots=True)
class LayerExperts:
    """The experts of one MoE layer on this rank."""

    layer: int
    backend: Backend[Any]
    quant_info: Any
    tables: ExpertTables
    placement: Placement


class ExpertBalance:
    """The counters of all MoE layers on this rank and, where experts have replicas, who holds which."""

    def __init__(self, num_layers: int, num_experts: int, layout: ParallelLayout, device: torch.device) -> None:
        self.counts_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self.layers: list[LayerExperts] = []
        self.num_moves = 0  # experts that have come to this rank
        self._layout = layout
        self._place = layout.moe_place

    @property
    def num_experts(self) -> int:
        """E."""
        return self.counts_LE.shape[1]

    def row(self, index: int, *, is_counting: bool) -> torch.Tensor | None:
        """Counters of the `index`-th MoE layer; None on a rank whose tokens another rank counts."""
        return self.counts_LE[index] if is_counting else None

    def table(self, placement: Placement) -> torch.Tensor:
        """The slots of the experts, for this rank's tokens."""
        return slot_table(placement, self.num_experts, first_row=self._layout.dp_rank).to(self.counts_LE.device)

    def total(self, world: Group = SINGLE_RANK) -> torch.Tensor:
        """Tokens of each expert on all ranks, int64 [L, E] on the device. All ranks call it together."""
        return world.all_reduce(self.counts_LE.clone())

    def rank_loads(self, index: int, load_E: Sequence[int]) -> list[float]:
        """Tokens of each expert-parallel rank in the `index`-th MoE layer, with the placement of now."""
        return self.layers[index].placement.rank_loads(load_E)

    @torch.inference_mode()
    def rebalance(self, index: int, load_E: Sequence[int], world: Group) -> int:
        """Place the experts of the `index`-th MoE layer anew; returns how many moved on all ranks.

        All ranks call it together, between two steps, with the same load. What comes is received into memory of its own
        first. Then it replaces what was there, in place, behind all steps that have been launched.
        """
        experts = self.layers[index]
        current, num_ranks = experts.placement, self._layout.ep_size
        planned = plan_placement(load_E, num_ranks, current.slots_per_rank, current)
        moves = moves_between(current, planned, self.num_experts)
        arrived = self._exchange(experts, moves, world)
        for slot, parts in arrived:
            experts.backend.put_expert(experts.quant_info, slot, parts)
        if moves and experts.tables.slots_CE is not None:
            experts.tables.slots_CE.copy_(self.table(planned))
        experts.placement = planned
        self.num_moves += len(arrived)
        return len(moves)

    def _exchange(
        self, experts: LayerExperts, moves: list[Move], world: Group
    ) -> list[tuple[int, list[torch.Tensor]]]:  # fmt: skip
        """Local slots of this rank that get an expert, and its parts."""
        per_rank, own = experts.placement.slots_per_rank, self._place.ep_rank
        sends: list[Parcel] = []
        receives: list[Parcel] = []
        coming: list[tuple[int, torch.Tensor]] = []

        def parts_of(slot: int) -> list[torch.Tensor]:
            return experts.backend.expert_parts(experts.quant_info, slot % per_rank)

        for move in moves:
            giver, taker = move.source // per_rank, move.slot // per_rank
            if giver == own:
                packed = _pack(parts_of(move.source))
                if taker == own:
                    coming.append((move.slot % per_rank, packed))
                else:
                    sends.append((self._world_rank(taker), packed))
            elif taker == own:
                num_bytes = sum(part.nbytes for part in parts_of(move.slot))
                packed = torch.empty(num_bytes, dtype=torch.uint8, device=self.counts_LE.device)
                receives.append((self._world_rank(giver), packed))
                coming.append((move.slot % per_rank, packed))
        world.exchange(sends, receives)
        return [(slot, _unpack(packed, parts_of(slot))) for slot, packed in coming]

    def _world_rank(self, ep_rank: int) -> int:
        """The rank with these experts that has the same part of each as this one."""
        return ep_rank * self._place.tp_size + self._place.tp_rank


def _pack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all bytes, uint8."""
    return torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in parts])


def _unpack(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of another expert, with the shapes and dtypes of `like`."""
    pieces = torch.split(packed, [part.nbytes for part in like])
    return [piece.clone().view(part.dtype).view(part.shape) for piece, part in zip(pieces, like, strict=True)]
