"""Which rank holds which experts, planned from how many tokens went to each of them. Pure policy: no tensors.

A rank has the same number of slots as every other. With more slots than experts, the busiest experts get replicas, so
that their tokens are shared between ranks (6 experts, 2 ranks of 4 slots, expert 0 takes half of the tokens):

    rank 0   slots 0 1 2 3   experts 0 2 4 1
    rank 1   slots 4 5 6 7   experts 0 3 5 1

A slot's number over all ranks is the id under which transports and kernels know the expert that it holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moe.errors import MoeConfigError

MOST_REPLICAS = 12  # of one expert: `moe.replicas` shares its tokens in twelfths
KEEP_WITHIN = 1.05  # a placement stays while its busiest rank has at most this much more than with a new one


@dataclass(frozen=True, slots=True)
class Placement:
    """The experts of one layer: `experts[rank][slot]`. No rank holds an expert twice."""

    experts: tuple[tuple[int, ...], ...]

    @property
    def slots_per_rank(self) -> int:
        """The same on every rank."""
        return len(self.experts[0])

    def slots_of(self, num_experts: int) -> list[list[int]]:
        """The slots that hold each expert, ascending."""
        slots: list[list[int]] = [[] for _ in range(num_experts)]
        for slot, expert in enumerate(expert for rank in self.experts for expert in rank):
            slots[expert].append(slot)
        return slots

    def rank_loads(self, load: Sequence[float]) -> list[float]:
        """Tokens of each rank, where an expert's tokens are shared evenly between its replicas."""
        num_replicas = [len(slots) for slots in self.slots_of(len(load))]
        return [sum(load[expert] / num_replicas[expert] for expert in rank) for rank in self.experts]


def check_slots(num_experts: int, num_redundant: int, num_ranks: int) -> int:
    """Slots of each rank.

    Raises:
        MoeConfigError: the ranks cannot share the slots evenly, or there are more than replicas can fill.
    """
    num_slots = num_experts + num_redundant
    if num_slots % num_ranks:
        nearest = -num_experts % num_ranks
        works = ", ".join(str(nearest + count * num_ranks) for count in range(3))
        raise MoeConfigError(
            f"num_redundant_experts is {num_redundant}: with the {num_experts} experts of a layer it must be a "
            f"multiple of the {num_ranks} expert-parallel ranks; {works}, ... would work"
        )
    most = num_experts * (min(num_ranks, MOST_REPLICAS) - 1)
    if num_redundant > most:
        raise MoeConfigError(
            f"num_redundant_experts is {num_redundant}: {num_experts} experts on {num_ranks} ranks can have at most "
            f"{most} replicas more, since a rank holds an expert once"
        )
    return num_slots // num_ranks


def plan_placement(
    load: Sequence[float], num_ranks: int, slots_per_rank: int, current: Placement | None = None
) -> Placement:
    """Share experts with these numbers of tokens between ranks, as evenly as a greedy choice does.

    Every rank of a service gets the same answer, because it depends on the arguments alone. With `current`, experts
    stay where they are as far as that costs nothing, and all of them stay if moving gains less than `KEEP_WITHIN`.
    """
    num_replicas = _count_replicas(load, num_ranks, num_ranks * slots_per_rank)
    ranks = _pack(load, num_replicas, num_ranks, slots_per_rank)
    if current is None:
        return Placement(tuple(tuple(sorted(experts)) for experts in ranks))
    planned = Placement(_keep_slots(ranks, current))
    if max(current.rank_loads(load)) <= KEEP_WITHIN * max(planned.rank_loads(load)):
        return current
    return planned


def _count_replicas(load: Sequence[float], num_ranks: int, num_slots: int) -> list[int]:
    """One slot for every expert; each further one to the expert whose replicas have most tokens."""
    num_replicas = [1] * len(load)
    most = min(num_ranks, MOST_REPLICAS)
    for _ in range(num_slots - len(load)):
        growing = (expert for expert, count in enumerate(num_replicas) if count < most)
        num_replicas[max(growing, key=lambda expert: (load[expert] / num_replicas[expert], -expert))] += 1
    return num_replicas


def _pack(
    load: Sequence[float], num_replicas: Sequence[int], num_ranks: int, slots_per_rank: int
) -> list[set[int]]:  # fmt: skip
    """Replicas with the most tokens first, each to the rank with the fewest tokens that has a slot and not yet it."""
    shares = [tokens / count for tokens, count in zip(load, num_replicas, strict=True)]
    order = sorted(range(len(load)), key=lambda expert: (-shares[expert], expert))
    ranks: list[set[int]] = [set() for _ in range(num_ranks)]
    sums = [0.0] * num_ranks
    for expert in order:
        for _ in range(num_replicas[expert]):
            open_ranks = [rank for rank in range(num_ranks) if len(ranks[rank]) < slots_per_rank]
            fitting = [rank for rank in open_ranks if expert not in ranks[rank]]
            if not fitting:
                fitting = [_make_room(expert, ranks, sums, shares, open_ranks[0])]
            rank = min(fitting, key=lambda each: (sums[each], len(ranks[each]), each))
            ranks[rank].add(expert)
            sums[rank] += shares[expert]
    return ranks


def _make_room(
    expert: int, ranks: list[set[int]], sums: list[float], shares: Sequence[float], open_rank: int
) -> int:  # fmt: skip
    """A full rank without `expert`, after one of its experts moved to `open_rank`, the only kind of rank with slots.

    There is one: an expert has no more replicas than there are ranks, and a full rank has more experts than an open
    one.
    """
    rank = min((each for each in range(len(ranks)) if expert not in ranks[each]), key=lambda each: (sums[each], each))
    moved = min(ranks[rank] - ranks[open_rank], key=lambda each: (shares[each], each))
    ranks[rank].remove(moved)
    ranks[open_rank].add(moved)
    sums[rank] -= shares[moved]
    sums[open_rank] += shares[moved]
    return rank


def _keep_slots(ranks: list[set[int]], current: Placement) -> tuple[tuple[int, ...], ...]:
    """Give each set of experts to the rank that holds most of it, and leave those experts in their slots."""
    free = set(range(len(ranks)))
    overlaps = sorted(
        ((-len(experts & set(held)), index, rank) for index, experts in enumerate(ranks)
         for rank, held in enumerate(current.experts)),
    )  # fmt: skip
    rank_of: dict[int, int] = {}
    for _, index, rank in overlaps:
        if index not in rank_of and rank in free:
            rank_of[index] = rank
            free.remove(rank)
    placed: list[tuple[int, ...]] = [()] * len(ranks)
    for index, rank in rank_of.items():
        held = current.experts[rank]
        coming = iter(sorted(ranks[index] - set(held)))
        placed[rank] = tuple(expert if expert in ranks[index] else next(coming) for expert in held)
    return tuple(placed)


@dataclass(frozen=True, slots=True)
class Move:
    """`slot` gets the expert that `source` holds; both are slots over all ranks."""

    source: int
    slot: int


def moves_between(current: Placement, planned: Placement, num_experts: int) -> list[Move]:
    """What changes, by slot: from the same rank where it holds the expert, else from its holders in turn."""
    holders, moves = current.slots_of(num_experts), []
    per_rank = current.slots_per_rank
    now = [expert for rank in current.experts for expert in rank]
    for slot, expert in enumerate(expert for rank in planned.experts for expert in rank):
        if now[slot] == expert:
            continue
        near = [source for source in holders[expert] if source // per_rank == slot // per_rank]
        source = near[0] if near else holders[expert][slot // per_rank % len(holders[expert])]
        moves.append(Move(source, slot))
    return moves
