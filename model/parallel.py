"""`ParallelLayout`: how a model is divided among ranks, and the place of one of them. Integers only, no tensors.

Ranks are numbered so that the ranks of one tensor-parallel group are neighbours (tp 2, dp 3, 6 ranks):

    rank            0   1 | 2   3 | 4   5
    dp_rank           0   |   1   |   2       each has its own requests and KV cache
    tp_rank         0   1 | 0   1 | 0   1     share the heads of one request

All ranks share the experts: first by expert among `ep_size` groups, then each expert by tensor inside a group.

    ep_size 6       ep_rank 0 1 2 3 4 5, every expert whole on one rank
    ep_size 3       ep_rank 0 0 1 1 2 2, every expert divided between two ranks
    ep_size 1       ep_rank 0 0 0 0 0 0, every expert divided among all ranks
"""

from dataclasses import dataclass

from model.errors import ModelSettingsError
from moe import MoeA2ABackend, RankPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """`tp_size` ranks share the attention of a request, `dp_size` such groups serve different requests, and `ep_size`
    groups of ranks have different experts. `rank` counts from 0 over all `tp_size * dp_size` ranks.

    Raises:
        ModelSettingsError: the sizes contradict each other; the message says what would work.
    """

    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for flag, size in (
            ("tensor_parallel_size", self.tp_size),
            ("data_parallel_size", self.dp_size),
            ("expert_parallel_size", self.ep_size),
        ):
            if size < 1:
                raise ModelSettingsError(f"{flag} is {size}: it must be at least 1")
        if self.num_ranks % self.ep_size:
            raise ModelSettingsError(
                f"expert_parallel_size is {self.ep_size}: it must divide the {self.num_ranks} ranks of "
                f"tensor_parallel_size {self.tp_size} x data_parallel_size {self.dp_size}; {self.num_ranks} gives "
                "every rank its own experts"
            )
        if self.dp_size > 1 and self.ep_size == 1:
            raise ModelSettingsError(
                f"data_parallel_size is {self.dp_size} and expert_parallel_size is 1: data-parallel ranks share their "
                f"experts, so set expert_parallel_size to {self.num_ranks}; for copies of the whole model, start "
                f"{self.dp_size} services"
            )
        if not 0 <= self.rank < self.num_ranks:
            raise ModelSettingsError(f"rank is {self.rank}: it must lie in 0..{self.num_ranks - 1}")

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.tp_size * self.dp_size

    @property
    def tp_rank(self) -> int:
        """Among the ranks that share the attention of a request; rank 0 of them schedules and samples."""
        return self.rank % self.tp_size

    @property
    def dp_rank(self) -> int:
        """Which requests: every `dp_rank` has its own scheduler and KV cache."""
        return self.rank // self.tp_size

    @property
    def tp_ranks(self) -> list[int]:
        """The ranks that share this rank's requests, itself included."""
        first = self.dp_rank * self.tp_size
        return list(range(first, first + self.tp_size))

    @property
    def dp_ranks(self) -> list[int]:
        """The ranks with the same part of attention, one for each `dp_rank`, itself included."""
        return list(range(self.tp_rank, self.num_ranks, self.tp_size))

    @property
    def dense_place(self) -> RankPlace:
        """This rank's part of attention, dense MLPs, embedding and head."""
        return RankPlace(tp_size=self.tp_size, tp_rank=self.tp_rank)

    @property
    def moe_place(self) -> RankPlace:
        """This rank's part of the experts."""
        tp_size = self.num_ranks // self.ep_size
        return RankPlace(
            tp_size=tp_size, tp_rank=self.rank % tp_size, ep_size=self.ep_size, ep_rank=self.rank // tp_size
        )

    def check_transport(self, a2a: MoeA2ABackend) -> None:
        """Refuse a transport that has nobody to send tokens to, or that would have to divide experts.

        Raises:
            ModelSettingsError: says which sizes would work.
        """
        if a2a is MoeA2ABackend.NONE or (self.num_ranks > 1 and self.ep_size == self.num_ranks):
            return
        if self.num_ranks == 1:
            raise ModelSettingsError(
                f"moe_a2a_backend is {a2a}, which moves tokens between expert-parallel ranks, but there is one rank: "
                "set it to none, or start several ranks with data_parallel_size and expert_parallel_size"
            )
        raise ModelSettingsError(
            f"moe_a2a_backend is {a2a}, which needs whole experts on every rank, but expert_parallel_size is "
            f"{self.ep_size} on {self.num_ranks} ranks: set it to {self.num_ranks}, or moe_a2a_backend to none"
        )
