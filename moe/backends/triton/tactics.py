"""Launch plans as tactics: their text form, and the few that are worth compiling for a token count.

Tuning never changes precision: plans with FP8 activations only serve the token counts that the untuned table has them
for.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe.backend import Tactic, TacticTable
from moe.backends.triton.plans import PlanTable
from moe.errors import MoeConfigError
from moe.kernels.plan import MAX_DIRECT_SLOTS, Plan

Fields = dict[str, Any]  # of a `Plan`, by name
_NUMBER = re.compile(r"[0-9]{1,9}")
_FIELDS = {field.name: field for field in dataclasses.fields(Plan)}
_DIRECT_SLOTS = 512  # with more slots, sorting is faster
_BY_EXPERT_TOKENS = 16  # from there on most experts are active
_FEW_SLOTS = 16  # the first matrix may have too few programs to keep the memory busy


def plan_text(plan: Plan) -> Tactic:
    """Fields that differ from their defaults: "is_direct=1,block_m=16,block_n_1=64,block_n_2=64,split_k=2"."""
    values = {name: getattr(plan, name) for name in _FIELDS}
    return ",".join(
        f"{name}={int(value)}"
        for name, value in values.items()
        if _FIELDS[name].default is dataclasses.MISSING or value != _FIELDS[name].default
    )


def plan_from_text(text: Tactic) -> Plan:
    """The plan that `plan_text` wrote.

    Raises:
        MoeConfigError: an unknown or missing field, a value that is not a number, or a plan that contradicts itself.
    """
    values: Fields = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name not in _FIELDS or not _NUMBER.fullmatch(number):
            raise MoeConfigError(f"{text!r} is no launch plan: {part!r} is no field and number")
        values[name] = bool(int(number)) if _FIELDS[name].type is bool else int(number)
    try:
        return Plan(**values)
    except TypeError as error:
        raise MoeConfigError(f"{text!r} is no launch plan: {error}") from None


def table_of(choice: TacticTable, untuned: PlanTable, top_k: int) -> PlanTable:
    """The chosen plans by token count; above the last count its plan, or the untuned ones if that is direct.

    A plan with FP8 activations does not reach down to counts for which the untuned table has none, except when it is
    the only one, as while it is measured.

    Raises:
        MoeConfigError: a text that is no plan, or a direct plan for more slots than it can take.
    """
    steps: list[tuple[int | None, Plan]] = []
    before = 0
    for count in sorted(map(int, choice)):
        plan = plan_from_text(choice[str(count)])
        if plan.is_direct and count * top_k > MAX_DIRECT_SLOTS:
            raise MoeConfigError(f"a direct plan takes {MAX_DIRECT_SLOTS} slots, not those of {count} tokens")
        if plan.fp8_activations and steps:
            steps += [
                (bound, other)
                for bound, other in untuned.steps
                if bound is not None and before < bound < count and not other.fp8_activations
            ]
        steps.append((count, plan))
        before = count
    last = steps[-1][1]
    if last.is_direct:
        steps += [(bound, plan) for bound, plan in untuned.steps if bound is None or bound > before]
    else:
        steps[-1] = (None, last)
    return PlanTable(tuple(steps))


def proposals(
    untuned: Plan, num_tokens: int, num_experts: int, top_k: int, measured: Mapping[Tactic, float], *, has_pdl: bool
) -> Sequence[Tactic]:
    """First the untuned plan and one plan of each other kind, then variations of the best of those.

    `num_experts`: of all ranks. `has_pdl`: the GPU can start a kernel while the one before it drains.
    """
    kinds = _kinds(num_tokens, num_experts, top_k, has_pdl)
    if untuned.fp8_activations:
        kinds = [dataclasses.replace(plan, fp8_activations=True) for plan in kinds if not plan.is_direct]
    first = _texts([untuned, *kinds])
    if any(tactic not in measured for tactic in first):
        return [tactic for tactic in first if tactic not in measured]
    best = plan_from_text(min(first, key=measured.__getitem__))
    return [tactic for tactic in _texts(_around(best, num_tokens, top_k, has_pdl)) if tactic not in measured]


def _texts(plans: Iterable[Plan]) -> list[Tactic]:
    return list(dict.fromkeys(plan_text(plan) for plan in plans))


def _kinds(num_tokens: int, num_experts: int, top_k: int, has_pdl: bool) -> list[Plan]:
    """A direct plan if there are few slots, and grouped plans whose tiles hold about the mean number of rows."""
    plans: list[Plan] = []
    rows = num_tokens * top_k / num_experts
    if num_tokens * top_k <= _DIRECT_SLOTS:
        block_m = 8 if num_tokens <= 8 else 16
        is_many = num_tokens > _BY_EXPERT_TOKENS
        width = 128 if is_many else 64
        plans.append(
            Plan(
                is_direct=True, block_m=block_m, block_n_1=width, block_n_2=width, split_k=1 if is_many else 2,
                by_expert=is_many, pdl=has_pdl,
            )
        )  # fmt: skip
    if num_tokens > _BY_EXPERT_TOKENS:
        for block_m, num_tile_heights in ((16, 1), (32, 2), (64, 3), (128, 3)):
            if min(rows, 128) / 2 <= block_m <= max(16, 2 * rows):
                plans.append(
                    Plan(
                        is_direct=False, block_m=block_m, num_tile_heights=num_tile_heights, block_n_1=128,
                        block_n_2=128, num_stages_1=3, num_stages_2=3, pdl=has_pdl,
                    )
                )  # fmt: skip
    return plans[:4]


def _around(best: Plan, num_tokens: int, top_k: int, has_pdl: bool) -> list[Plan]:
    """Valid plans that differ from `best` in one respect."""

    def other(value: int, first: int, second: int) -> int:
        return second if value == first else first

    changes: list[Fields]
    if best.is_direct:
        changes = [
            {"num_stages_1": other(best.num_stages_1, 4, 6)},
            {"num_stages_2": other(best.num_stages_2, 4, 6)},
            {"block_n_1": other(best.block_n_1, 64, 128)},
            {"split_k": other(best.split_k, 2, 1)},
            {"num_warps_1": other(best.num_warps_1, 4, 2), "num_warps_2": other(best.num_warps_2, 4, 2)},
            {"block_m": other(best.block_m, 8, 16)} if num_tokens > 1 else {"split_k": 4},
        ]
        if num_tokens * top_k <= _FEW_SLOTS:
            changes += [{"split_k_1": parts} for parts in (1, 2, 4) if parts != best.split_k_1]
    else:
        wide = {"block_n_1": other(best.block_n_1, 128, 256), "block_n_2": other(best.block_n_2, 128, 256)}
        warps = 8 if max(wide.values()) * best.block_m >= 128 * 128 else 4
        changes = [
            wide | {"num_warps_1": warps, "num_warps_2": warps},
            {"num_stages_1": other(best.num_stages_1, 3, 4), "num_stages_2": other(best.num_stages_2, 3, 4)},
            {"tile_group": other(best.tile_group, 4, 8)},
            {"num_tile_heights": other(best.num_tile_heights, 1, 2)},
            {"pdl": has_pdl and not best.pdl},
        ]
    plans = []
    for change in changes:
        try:
            plans.append(dataclasses.replace(best, **change))
        except MoeConfigError:
            continue
    return plans
