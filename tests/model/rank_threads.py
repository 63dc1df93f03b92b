"""Ranks of a model as threads of one process: groups whose collectives meet in memory, and checkpoints to divide."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from loaders.hf_config import read_config
from model.config import ModelSettings
from model.decoder import Model
from model.load import load_model
from model.parallel import ParallelLayout
from model.registry import make_family
from moe.group import SINGLE_RANK, Parcel, PartialSum, RankGroups, SumPlace, gather_then_place
from tests.emulators.ranks import Rank, RankGroup, run_ranks

T = TypeVar("T")


class ThreadGroup:
    """The collectives of `moe.group.Group`; tensors of different shapes are an error, as they hang in real groups."""

    is_capturable = False
    mail = None

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.calls: list[str] = []

    @property
    def rank(self) -> int:
        return self._rank.rank()

    @property
    def size(self) -> int:
        return self._rank.size()

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, place: SumPlace = SumPlace.MLP
    ) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def add_norm(self, x_TH: torch.Tensor | None, delta: PartialSum, weight_H: torch.Tensor, eps: float) -> None:
        return None

    def gather_columns(self, own_TU: torch.Tensor, out_TV: torch.Tensor, width: int) -> None:
        gather_then_place(self, own_TU, out_TV, width)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(sum(self._meet("all_reduce", x)))  # type: ignore[arg-type]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._meet("all_gather", x))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] % self.size == 0
        total: torch.Tensor = sum(self._meet("reduce_scatter", x))  # type: ignore[assignment]
        return total.chunk(self.size)[self.rank] if x.shape[0] else total

    def exchange(self, sends: list[Parcel], receives: list[Parcel]) -> None:
        everybody = self._rank.exchange([(rank, tensor.clone()) for rank, tensor in sends])
        arriving = {peer: [tensor for rank, tensor in own if rank == self.rank] for peer, own in enumerate(everybody)}
        for peer, tensor in receives:
            tensor.copy_(arriving[peer].pop(0))
        assert not any(arriving.values()), "a parcel that nobody expects"

    def max(self, values: list[float]) -> list[float]:
        return [max(column) for column in zip(*self._rank.exchange(values), strict=True)]

    def broadcast(self, value: T) -> T:
        return self._rank.exchange(value)[0]

    def _meet(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        self.calls.append(name)
        everybody = self._rank.exchange((name, x.clone()))
        assert len({(kind, tensor.shape, tensor.dtype) for kind, tensor in everybody}) == 1
        return [tensor for _, tensor in everybody]


def run_layout(sizes: dict[str, int], work: Callable[[ParallelLayout, RankGroups], T]) -> list[T]:
    """`work` on every rank of a layout; results in rank order."""
    whole = ParallelLayout(**sizes)
    rows = [RankGroup(whole.tp_size) for _ in range(whole.dp_size)]
    columns = [RankGroup(whole.dp_size) for _ in range(whole.tp_size)]

    def on_rank(rank: Rank) -> T:
        layout = ParallelLayout(**sizes, rank=rank.rank())
        groups = RankGroups(
            world=rank,  # type: ignore[arg-type]
            tp=_group(rows[layout.dp_rank], layout.tp_rank), dp=_group(columns[layout.tp_rank], layout.dp_rank),
        )  # fmt: skip
        with torch.inference_mode():
            return work(layout, groups)

    return run_ranks(whole.num_ranks, on_rank)


def load_rank(folder: Path, layout: ParallelLayout, groups: RankGroups, **settings: Any) -> Model:
    """This rank's part of the model in `folder`."""
    return load_model(make_family(read_config(folder)), folder, ModelSettings(layout=layout, **settings), groups)


def _group(meeting: RankGroup, index: int) -> Any:
    return SINGLE_RANK if meeting.size == 1 else ThreadGroup(Rank(meeting, index))
