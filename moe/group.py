"""`Group`: collectives among ranks. Every rank of a group makes the same calls, with tensors of the same shape.

Over NCCL on GPUs, over gloo on CPUs. gloo moves a GPU's tensors through the host, which no CUDA graph can capture; it
serves several ranks that share one GPU, which NCCL refuses.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
Parcel = tuple[int, torch.Tensor]
"""A rank of the group, and a contiguous uint8 tensor that goes there or comes from there."""


class SumPlace(IntEnum):
    """Which of a layer's two sums over ranks: each has memory of its own (`moe.one_shot`)."""

    ATTENTION = 0
    MLP = 1


@dataclass(frozen=True, slots=True)
class TokenMail:
    """Boxes, an int32 each, in which a rank gets tokens that the first rank of its group chose; 0 is an empty box.

    `addresses`: of each rank's boxes, as this rank addresses them.
    """

    addresses: tuple[int, ...]
    rank: int
    num_boxes: int


class Group(Protocol):
    """The ranks of a group, seen from one of them."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def is_capturable(self) -> bool:
        """Whether CUDA graphs can hold the collectives."""

    @property
    def mail(self) -> TokenMail | None:
        """How kernels of a rank can send tokens to the others; None if none can."""

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, place: SumPlace = SumPlace.MLP
    ) -> torch.Tensor:
        """Uninitialized memory for a part of a sum, until the next call of `empty` or until that sum is added up."""

    def add_norm(
        self, x_TH: torch.Tensor | None, delta: "PartialSum", weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`x`, if there is one, plus the sum over all ranks, and its RMS norm, in one kernel; None if there is none for
        these tensors.
        """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of the contiguous `x`, which may be overwritten with it."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[N, ...] of every rank, in rank order, as one [size * N, ...]."""

    def gather_columns(self, own_TU: torch.Tensor, out_TV: torch.Tensor, width: int) -> None:
        """Put the columns of all ranks side by side into `out`, where rank r's begin at r * width.

        V columns are divided so: only the last ranks have fewer than the width, which may be none.
        """

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[size * N, ...] to [N, ...]: this rank's rows of the sum over all ranks."""

    def exchange(self, sends: list[Parcel], receives: list[Parcel]) -> None:
        """Send tensors to ranks and fill those that come from ranks. Between two ranks they arrive in order."""

    def max(self, values: list[float]) -> list[float]:
        """Element-wise maximum over all ranks, through the host."""

    def broadcast(self, value: T) -> T:
        """Rank 0's value, any object, through the host."""


class SingleRank:
    """A group of one: every collective returns what it gets."""

    rank = 0
    size = 1
    is_capturable = True
    mail = None

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, place: SumPlace = SumPlace.MLP
    ) -> torch.Tensor:
        """New."""
        del place
        return torch.empty(shape, dtype=dtype, device=device)

    def add_norm(
        self, x_TH: torch.Tensor | None, delta: "PartialSum", weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """None."""
        del x_TH, delta, weight_H, eps
        return None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x`."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """`x`."""
        return x

    def gather_columns(self, own_TU: torch.Tensor, out_TV: torch.Tensor, width: int) -> None:
        """A copy."""
        del width
        out_TV.copy_(own_TU)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """`x`."""
        return x

    def exchange(self, sends: list[Parcel], receives: list[Parcel]) -> None:
        """Does nothing: there is nobody to send to."""

    def max(self, values: list[float]) -> list[float]:
        """The values."""
        return values

    def broadcast(self, value: T) -> T:
        """The value."""
        return value


class TorchGroup:
    """A torch process group; None is the one of all processes. `max` and `broadcast` need gloo for CPU tensors."""

    mail = None

    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        self._group = group

    @cached_property
    def rank(self) -> int:
        """Within the group."""
        return int(torch.distributed.get_rank(self._group))

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return int(torch.distributed.get_world_size(self._group))

    @property
    def name(self) -> str:
        """The process group's."""
        group = torch.distributed.group.WORLD if self._group is None else self._group
        return str(group.group_name)  # type: ignore[union-attr]

    @cached_property
    def is_capturable(self) -> bool:
        """True if tensors of a GPU travel over NCCL."""
        return "cuda:gloo" not in torch.distributed.get_backend_config(self._group)

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, place: SumPlace = SumPlace.MLP
    ) -> torch.Tensor:
        """New."""
        del place
        return torch.empty(shape, dtype=dtype, device=device)

    def add_norm(
        self, x_TH: torch.Tensor | None, delta: "PartialSum", weight_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """None."""
        del x_TH, delta, weight_H, eps
        return None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """In place."""
        if x.numel() and self.size > 1:
            sent = self._sendable(x)
            torch.distributed.all_reduce(sent, group=self._group)
            if sent is not x:
                x.copy_(sent)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Into one new tensor."""
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return self._into(gathered, x, _collective("all_gather_single", "all_gather_into_tensor"))

    def gather_columns(self, own_TU: torch.Tensor, out_TV: torch.Tensor, width: int) -> None:
        """By an all-gather, then a copy for each rank."""
        gather_then_place(self, own_TU, out_TV, width)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Into a new tensor."""
        own = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return self._into(own, x, _collective("reduce_scatter_single", "reduce_scatter_tensor"))

    def exchange(self, sends: list[Parcel], receives: list[Parcel]) -> None:
        """All at once; uint8, since gloo knows few dtypes."""
        arrivals = [(self._sendable(tensor), tensor) for _, tensor in receives]
        jobs = [
            torch.distributed.P2POp(torch.distributed.isend, self._sendable(tensor), group=self._group, group_peer=rank)
            for rank, tensor in sends
        ] + [
            torch.distributed.P2POp(torch.distributed.irecv, staged, group=self._group, group_peer=rank)
            for (rank, _), (staged, _) in zip(receives, arrivals, strict=True)
        ]
        for job in torch.distributed.batch_isend_irecv(jobs) if jobs else ():
            job.wait()
        for staged, tensor in arrivals:
            if staged is not tensor:
                tensor.copy_(staged)

    def max(self, values: list[float]) -> list[float]:
        """By all-reduce."""
        tensor = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return [float(value) for value in tensor]

    def broadcast(self, value: T) -> T:
        """By broadcast."""
        box = [value]
        torch.distributed.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]

    def _into(self, result: torch.Tensor, x: torch.Tensor, collective: Callable[..., object]) -> torch.Tensor:
        """`result`, filled by a collective of `x`, on the host where the group cannot move a GPU's tensors itself."""
        if x.numel():
            sent = self._sendable(x.contiguous())
            out = result if sent.device == x.device else torch.empty_like(result, device=sent.device)
            collective(out, sent, group=self._group)
            if out is not result:
                result.copy_(out)
        return result

    def _sendable(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, or a copy on the host where the group cannot move a GPU's tensors itself."""
        return x if x.device.type == "cpu" or self.is_capturable else x.cpu()


def gather_then_place(group: Group, own_TU: torch.Tensor, out_TV: torch.Tensor, width: int) -> None:
    """`Group.gather_columns` by the group's all-gather."""
    missing = width - own_TU.shape[1]
    padded_TU = torch.nn.functional.pad(own_TU, (0, missing)) if missing else own_TU
    by_rank_RTU = group.all_gather(padded_TU).view(group.size, *padded_TU.shape)
    for rank, part_TU in enumerate(by_rank_RTU):
        columns_TU = out_TV[:, rank * width : (rank + 1) * width]
        columns_TU.copy_(part_TU[:, : columns_TU.shape[1]])


SINGLE_RANK = SingleRank()


@dataclass(frozen=True, slots=True)
class PartialSum:
    """One rank's part [T, H] of a sum over a group, which whoever reads it next adds up. All ranks do that together."""

    part: torch.Tensor
    group: Group
    place: SumPlace

    def added_up(self) -> torch.Tensor:
        """[T, H]; the part may be overwritten with it."""
        return self.group.all_reduce(self.part.contiguous())

    def rows(self, rows_R: torch.Tensor) -> "PartialSum":
        """Of the rows with these indices alone, int64 [R]."""
        return replace(self, part=self.part.index_select(0, rows_R))

    def give_up(self) -> None:
        """Take part in the sum with NaN, because this rank's part cannot be computed and the others wait for it."""
        lost = replace(self, part=torch.full_like(self.part, float("nan")))
        weight_H = torch.ones(self.part.shape[1], device=self.part.device)
        if self.group.add_norm(lost.part, lost, weight_H, 1.0) is None:
            lost.added_up()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroups:
    """The groups of one rank of a model. `world`: all ranks, which share the experts; what transports are built on.

    `tp`: the ranks that share the attention of a request. `dp`: one rank of each such group. They divide the world
    between them: every rank of it is in one row (tp) and one column (dp).
    """

    world: "ProcessGroup | None" = None
    tp: Group = SINGLE_RANK
    dp: Group = SINGLE_RANK

    @property
    def whole(self) -> Group:
        """All ranks."""
        return SINGLE_RANK if self.world is None else TorchGroup(self.world)


def _collective(name: str, old_name: str) -> Callable[..., object]:
    """A function of torch.distributed under the name that the installed release prefers."""
    return getattr(torch.distributed, name, None) or getattr(torch.distributed, old_name)
