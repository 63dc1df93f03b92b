"""Placements of experts: every expert somewhere, nobody twice on a rank, even, and still where nothing is gained."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.errors import MoeConfigError
from moe.placement import KEEP_WITHIN, MOST_REPLICAS, Placement, check_slots, moves_between, plan_placement
from tests.tables import rows


@st.composite
def layers(draw):
    """Two loads of one layer, its ranks and the slots of each."""
    num_ranks = draw(st.integers(2, 6))
    num_experts = num_ranks * draw(st.integers(1, 5))
    extra = draw(st.integers(0, num_experts // num_ranks * (min(num_ranks, MOST_REPLICAS) - 1)))
    load = st.lists(st.integers(0, 10_000), min_size=num_experts, max_size=num_experts)
    return draw(load), draw(load), num_ranks, num_experts // num_ranks + extra


@given(layers())
@settings(max_examples=150, deadline=None)
def test_every_expert_has_a_slot_and_no_rank_has_it_twice(layer):
    load, later, num_ranks, slots_per_rank = layer
    first = plan_placement(load, num_ranks, slots_per_rank)
    for placement in (first, plan_placement(later, num_ranks, slots_per_rank, first)):
        assert [len(set(rank)) for rank in placement.experts] == [slots_per_rank] * num_ranks
        assert all(placement.slots_of(len(load)))
        assert sum(placement.rank_loads(load)) == pytest.approx(sum(load))


@given(layers())
@settings(max_examples=150, deadline=None)
def test_replicas_go_where_they_lower_the_most(layer):
    load, _, num_ranks, slots_per_rank = layer
    placement = plan_placement(load, num_ranks, slots_per_rank)
    counts = [len(slots) for slots in placement.slots_of(len(load))]
    shares = [tokens / count for tokens, count in zip(load, counts, strict=True)]
    most = min(num_ranks, MOST_REPLICAS)
    growable = [shares[e] for e, count in enumerate(counts) if count < most]
    given_away = [load[e] / (count - 1) for e, count in enumerate(counts) if count > 1]
    assert not growable or not given_away or max(growable) <= min(given_away)
    if slots_per_rank * num_ranks == len(load):
        assert max(counts) == 1


@given(layers())
@settings(max_examples=150, deadline=None)
def test_moves_lead_to_the_plan_never_make_it_worse_and_end(layer):
    load, later, num_ranks, slots_per_rank = layer
    before = plan_placement(load, num_ranks, slots_per_rank)
    after = plan_placement(later, num_ranks, slots_per_rank, before)
    assert max(after.rank_loads(later)) <= max(before.rank_loads(later)) * (1 + 1e-9)
    held = [expert for rank in before.experts for expert in rank]
    moved = list(held)
    for move in moves_between(before, after, len(load)):
        moved[move.slot] = held[move.source]
    assert moved == [expert for rank in after.experts for expert in rank]
    again = plan_placement(later, num_ranks, slots_per_rank, after)
    assert again is after or max(again.rank_loads(later)) * KEEP_WITHIN < max(after.rank_loads(later))
    assert moves_between(after, after, len(load)) == []


@rows(
    "load, num_ranks, slots_per_rank, busiest",
    ([8, 0, 0, 0], 2, 3, 4),  # the busy expert is on both
    ([4, 4, 4, 4], 2, 2, 8),
    ([9, 1, 1, 1], 4, 2, 3.25),  # nine on four ranks, and one of the others beside it
    ([100, 60, 40, 30, 20, 10, 5, 5], 2, 5, 135),
)
def test_the_busiest_rank(load, num_ranks, slots_per_rank, busiest):
    assert max(plan_placement(load, num_ranks, slots_per_rank).rank_loads(load)) == busiest


@rows("num_experts, num_ranks, num_redundant", (32, 2, 2), (64, 8, 8), (128, 4, 8), (256, 16, 32))
def test_crowded_experts_are_spread_evenly(num_experts, num_ranks, num_redundant):
    """Loads as of Zipf's law, in random order: the busiest rank has little more than the mean."""
    ratios = []
    for seed in range(5):
        load = [int(100_000 / (1 + place) ** 0.8) for place in range(num_experts)]
        random.Random(seed).shuffle(load)
        placement = plan_placement(load, num_ranks, (num_experts + num_redundant) // num_ranks)
        ratios.append(max(placement.rank_loads(load)) * num_ranks / sum(load))
    assert max(ratios) < 1.06


def test_a_small_gain_moves_nothing():
    current = Placement(((0, 1), (2, 3)))
    assert plan_placement([10, 10, 10, 10.5], 2, 2, current) is current
    assert plan_placement([10, 10, 1, 1], 2, 2, current) != current


def test_what_stays_keeps_its_slot_and_a_near_copy_is_taken_first():
    current = Placement(((0, 1, 2), (3, 4, 0)))
    planned = plan_placement([1, 1, 1, 1, 100], 2, 3, current)
    held, later = (sum(placement.experts, ()) for placement in (current, planned))
    assert sum(old == new for old, new in zip(held, later, strict=True)) >= 4
    for move in moves_between(current, Placement(((1, 0, 2), (3, 4, 0))), 5):
        assert move.source // 3 == 0, "rank 0 has both"


@rows(
    "num_experts, num_redundant, num_ranks, message",
    (8, 1, 4, "num_redundant_experts is 1: .* multiple of the 4 .*; 0, 4, 8, ... would work"),
    (6, 0, 4, "2, 6, 10, ... would work"),
    (4, 6, 2, "at most 4 replicas more"),
)
def test_numbers_that_do_not_fit_are_refused(num_experts, num_redundant, num_ranks, message):
    with pytest.raises(MoeConfigError, match=message):
        check_slots(num_experts, num_redundant, num_ranks)
