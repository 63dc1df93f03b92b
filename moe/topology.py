"""Where one rank stands among the tensor- and expert-parallel ranks, and how it allocates outputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe.config import MoeA2ABackend
from moe.dispatch.dtype import DispatchDtype
from moe.errors import MoeConfigError

_CPU = torch.device("cpu")
Allocator = Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor]


def _plain_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Ranks and sizes of one MoE layer. `allocator` gives symmetric memory where the group has it.

    `a2a` is the transport between the expert-parallel ranks, `dispatch_dtype` the number format of what it brings; some
    backends lay weights out differently for them.
    """

    device: torch.device = _CPU
    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    a2a: MoeA2ABackend = MoeA2ABackend.NONE
    dispatch_dtype: DispatchDtype = DispatchDtype.BF16
    allocator: Allocator = _plain_empty

    def __post_init__(self) -> None:
        for axis in ("tp", "ep"):
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            if size < 1:
                raise MoeConfigError(f"{axis}_size is {size}: it must be at least 1")
            if not 0 <= rank < size:
                raise MoeConfigError(f"{axis}_rank is {rank}: it must lie in 0..{size - 1}")

    @property
    def is_partial(self) -> bool:
        """True when one rank's expert output must still be summed over ranks (no transport does it)."""
        return self.tp_size * self.ep_size > 1

    def expert_range(self, num_experts: int) -> range:
        """Global ids of the experts this rank owns."""
        if num_experts % self.ep_size:
            raise MoeConfigError(f"ep_size is {self.ep_size}: it must divide the {num_experts} experts")
        num_local = num_experts // self.ep_size
        return range(self.ep_rank * num_local, (self.ep_rank + 1) * num_local)

    def alloc_output(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised tensor for a kernel's result, on this rank's device."""
        return self.allocator(shape, dtype, self.device)
