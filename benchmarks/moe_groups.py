"""Divides a plan search among processes: who takes which layer and token counts, and what the card holds at once."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.moe_cases import CASES, LayerCase
from benchmarks.moe_plans import candidates
from benchmarks.moe_timing import ROTATION_BYTES, copies_needed
from benchmarks.moe_warm import CONTEXT_BYTES
from moe.kernels.plan import Plan

PREPARING = 3  # processes that may prepare their layers at the same time, which takes more memory than the rest
PREPARING_LAYERS = 1.5  # beside the prepared one: the canonical one, and half of it again while it is stacked
PREPARING_BYTES = 1e9  # one expert unpacked, by the packing or by the twin
FREE_SHARE = 0.95  # of the free memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The work of one process: a layer and the token counts that it searches plans for."""

    model: str
    format_name: str
    tokens: tuple[int, ...]
    num_sets: int

    def __str__(self) -> str:
        return f"{self.model} {self.format_name} {','.join(map(str, self.tokens))}"

    @property
    def case(self) -> LayerCase:
        """The layer."""
        return CASES[self.model]

    def num_copies(self, num_tokens: int) -> int:
        """Copies of the layer that the rotation needs; one where the id sets alone take enough other experts."""
        case = self.case
        share = case.active(num_tokens) / case.num_experts
        num_distinct = case.num_experts * (1 - (1 - share) ** self.num_sets)  # in the mean of random sets
        set_bytes = num_distinct * case.expert_bytes(self.format_name)
        return 1 if set_bytes >= ROTATION_BYTES else copies_needed(set_bytes)

    @property
    def work(self) -> int:
        """Estimate of what there is to compile: kernels, each as often as it has bodies."""
        kernels: set[tuple[int, ...]] = set()
        for num_tokens in self.tokens:
            for plan in candidates(self.case, num_tokens, self.format_name):
                kernels.update(_kernels(plan, num_tokens))
        return sum(num_bodies for num_bodies, *_ in kernels)

    @property
    def bytes_kept(self) -> float:
        """Memory on the card from the end of the preparation on."""
        slots = max(self.tokens) * self.case.top_k
        activations = 4 * slots * (self.case.hidden_size + self.case.intermediate_size)
        return CONTEXT_BYTES + activations + max(map(self.num_copies, self.tokens)) * self._layer_bytes

    @property
    def bytes_preparing(self) -> float:
        """Memory on the card that is needed on top of that while it prepares."""
        return PREPARING_BYTES + PREPARING_LAYERS * self._layer_bytes

    @property
    def _layer_bytes(self) -> float:
        return self.case.num_experts * self.case.expert_bytes(self.format_name)


def _kernels(plan: Plan, num_tokens: int) -> Iterator[tuple[int, ...]]:
    """(bodies, what else tells them apart) of the kernels of both matrices."""
    num_looked_up = num_tokens if plan.is_direct and num_tokens > plan.block_m else 0
    special = (num_tokens == 1, num_tokens % 16 == 0)  # sizes that the compiler makes kernels of their own for
    shared = (
        plan.num_tile_heights,
        plan.is_direct,
        plan.block_m,
        plan.by_expert,
        plan.fp8_activations,
        num_looked_up,
        *special,
    )
    yield (*shared, 1, plan.block_n_1, plan.num_warps_1, plan.num_stages_1, plan.split_k_1)
    yield (*shared, 2, plan.block_n_2, plan.num_warps_2, plan.num_stages_2, plan.split_k)


def batches(groups: list[Group], free_bytes: float, num_cores: int) -> list[list[Group]]:
    """Groups that run at the same time, batch after batch: at most one per core, and no more than fit onto the card.

    Takes one group per layer, and divides those while cores and memory are left. One that fits nowhere stands alone.
    """
    filled: list[list[Group]] = []
    for group in groups:
        if filled and _fits([*filled[-1], group], free_bytes, num_cores):
            filled[-1].append(group)
        else:
            filled.append([group])
    return [_divided(batch, free_bytes, num_cores) for batch in filled]


def _fits(batch: list[Group], free_bytes: float, num_cores: int) -> bool:
    preparing = sorted((group.bytes_preparing for group in batch), reverse=True)[:PREPARING]
    num_bytes = sum(group.bytes_kept for group in batch) + sum(preparing)
    return len(batch) <= num_cores and num_bytes <= FREE_SHARE * free_bytes


def _divided(batch: list[Group], free_bytes: float, num_cores: int) -> list[Group]:
    """The heaviest group in two, again and again."""
    for group in sorted(batch, key=lambda group: -group.work):
        if len(group.tokens) > 1:
            halves = min(_halves(group), key=lambda pair: max(half.work for half in pair))
            divided = [*(other for other in batch if other is not group), *halves]
            if _fits(divided, free_bytes, num_cores):
                return _divided(divided, free_bytes, num_cores)
    return batch


def _halves(group: Group) -> Iterator[tuple[Group, Group]]:
    for cut in range(1, len(group.tokens)):
        yield replace(group, tokens=group.tokens[:cut]), replace(group, tokens=group.tokens[cut:])
