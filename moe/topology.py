"""`Topology`: a rank's place, device, transport and output allocator. `check_fit` checks weights and settings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from moe.config import DispatchDtype, MoeA2ABackend, MoeRunnerConfig
from moe.errors import MoeConfigError
from moe.formats import ExpertWeights
from moe.geometry import RankPlace

_CPU = torch.device("cpu")
Allocator = Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor]


def _plain_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@dataclass(frozen=True, kw_only=True)
class Topology(RankPlace):
    """The rank's place, its device and its link to other ranks.

    `allocator` gives symmetric memory if the group has it. `a2a` is the transport between the expert-parallel ranks,
    and `dispatch_dtype` the number format of the tokens it sends; some weight layouts depend on both.
    """

    device: torch.device = _CPU
    a2a: MoeA2ABackend = MoeA2ABackend.NONE
    dispatch_dtype: DispatchDtype = DispatchDtype.BF16
    allocator: Allocator = _plain_empty

    @classmethod
    def at(cls, place: RankPlace, *, device: torch.device = _CPU, a2a: MoeA2ABackend = MoeA2ABackend.NONE) -> Self:
        """The topology of a rank whose place is known."""
        return cls(
            tp_size=place.tp_size,
            tp_rank=place.tp_rank,
            ep_size=place.ep_size,
            ep_rank=place.ep_rank,
            device=device,
            a2a=a2a,
        )

    @property
    def is_partial(self) -> bool:
        """True if expert outputs are partial sums over ranks that no transport adds up."""
        return self.num_ranks > 1

    def alloc_output(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized tensor for a kernel's result, on this rank's device."""
        return self.allocator(shape, dtype, self.device)


def check_fit(experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> None:
    """Refuse weights, settings and a topology that belong to different layers or ranks.

    Weights may be cut without padding, so a rank's part of the intermediate axis may be shorter or empty.

    Raises:
        MoeConfigError: names what disagrees, with both numbers.
    """
    if config.place != topology.place:
        raise MoeConfigError(
            f"the layer's settings are for {_rank_of(config.place)}, but its topology is {_rank_of(topology)}"
        )
    cut = config.place.cut(config.shape.intermediate_size, config.scale_block)
    for name, found, allowed in (
        ("num_experts", experts.num_experts, (config.num_local_experts,)),
        ("hidden_size", experts.hidden_size, (config.hidden_size,)),
        ("intermediate_size", experts.intermediate_size, (cut.padded, cut.length)),
    ):
        if found not in allowed:
            raise MoeConfigError(f"{name} of this rank is {allowed[0]} by its settings, but {found} in its weights")


def _rank_of(place: RankPlace) -> str:
    return f"tp rank {place.tp_rank} of {place.tp_size}, ep rank {place.ep_rank} of {place.ep_size}"
