"""Launch plans as tactics: their text, the tables made of them, and that a search compiles few and fitting ones."""

import itertools
from dataclasses import replace

import pytest
import torch

from moe import MoeConfigError, Topology
from moe.backend import Tactic
from moe.backends.triton.backend import TritonBackend, TritonMoeQuantInfo
from moe.backends.triton.plans import LayerShape, PlanTable, plans_for
from moe.backends.triton.tactics import plan_from_text, plan_text, proposals, table_of
from moe.formats import Bf16Weight, ExpertWeights
from moe.kernels.plan import MAX_DIRECT_SLOTS, Plan
from tests.moe.backends import hostile
from tests.moe.configs import rank_config
from tests.tables import rows

DIRECT = Plan(is_direct=True, block_m=16, block_n_1=64, block_n_2=128, split_k=2, pdl=True)
GROUPED = Plan(is_direct=False, block_m=64, block_n_1=128, block_n_2=128, num_tile_heights=3)
FP8 = replace(GROUPED, fp8_activations=True)
UNTUNED = PlanTable(((16, replace(DIRECT, split_k=1)), (None, replace(GROUPED, num_tile_heights=1))))
SHAPES = [(32, 4), (128, 4), (64, 8), (4, 2), (1, 1)]


def test_text_round_trip() -> None:
    assert plan_text(DIRECT) == "is_direct=1,block_m=16,block_n_1=64,block_n_2=128,split_k=2,pdl=1"
    assert plan_text(replace(DIRECT, split_k_1=4)).endswith("split_k=2,split_k_1=4,pdl=1")
    for plan in (DIRECT, replace(DIRECT, split_k_1=4), GROUPED, FP8, *(plan for _, plan in UNTUNED.steps)):
        assert plan_from_text(plan_text(plan)) == plan


def test_other_texts_are_refused(subtests: pytest.Subtests) -> None:
    for text, words in [
        ("", "is no field and number"),
        ("is_direct=1", "is no launch plan"),
        ("is_direct=1,block_m=16,block_n_1=64,block_n_2=64,depth=2", "'depth=2' is no field"),
        ("is_direct=1,block_m=-8,block_n_1=64,block_n_2=64", "'block_m=-8' is no field"),
        ("is_direct=1,block_m=²,block_n_1=64,block_n_2=64", "'block_m=²' is no field"),
        (f"is_direct=1,block_m={'9' * 5000},block_n_1=64,block_n_2=64", "is no field and number"),
        ("is_direct=1,block_m=12,block_n_1=64,block_n_2=64", "power of two"),
        ("is_direct=0,block_m=16,block_n_1=64,block_n_2=64,split_k=2", "belong to direct plans"),
    ]:
        with subtests.test(text=text, words=words), pytest.raises(MoeConfigError, match=words):
            plan_from_text(text)


def test_a_choice_becomes_a_table_with_an_open_end() -> None:
    mixed = table_of({"64": plan_text(GROUPED), "4": plan_text(DIRECT), "512": plan_text(GROUPED)}, UNTUNED, 4)
    assert mixed == PlanTable(((4, DIRECT), (64, GROUPED), (None, GROUPED)))
    is_direct = table_of({"1": plan_text(DIRECT), "8": plan_text(DIRECT)}, UNTUNED, 4)
    assert is_direct == PlanTable(((1, DIRECT), (8, DIRECT), *UNTUNED.steps))
    beyond = table_of({"16": plan_text(DIRECT)}, UNTUNED, 4)
    assert beyond == PlanTable(((16, DIRECT), UNTUNED.steps[-1]))
    with pytest.raises(MoeConfigError, match="not those of 300 tokens"):
        table_of({"300": plan_text(DIRECT)}, UNTUNED, 4)


def test_a_plan_with_fp8_activations_keeps_to_the_token_counts_of_the_untuned_table() -> None:
    untuned = PlanTable(((16, DIRECT), (100, GROUPED), (1023, replace(GROUPED, num_tile_heights=2)), (None, FP8)))
    faster = replace(FP8, num_stages_1=3)
    tuned = table_of({"64": plan_text(GROUPED), "4096": plan_text(faster)}, untuned, 4)
    assert tuned == PlanTable(((64, GROUPED), *untuned.steps[1:3], (None, faster)))
    both = table_of({"64": plan_text(GROUPED), "2048": plan_text(faster), "4096": plan_text(FP8)}, untuned, 4)
    assert both == PlanTable(((64, GROUPED), *untuned.steps[1:3], (2048, faster), (None, FP8)))
    alone = table_of({"4096": plan_text(faster)}, untuned, 4)
    assert alone == PlanTable(((None, faster),)), "as it is measured"


def test_precision_is_the_untuned_plans(subtests: pytest.Subtests) -> None:
    for is_fp8, num_tokens in itertools.product([True, False], [8, 64, 1024, 4096]):
        with subtests.test(is_fp8=is_fp8, num_tokens=num_tokens):
            rounds = all_rounds(replace(GROUPED, fp8_activations=is_fp8), num_tokens, 256, 8, True)
            plans = [plan_from_text(tactic) for batch in rounds for tactic in batch]
            assert len(plans) > 2
            assert all(plan.fp8_activations == is_fp8 for plan in plans)
            assert any(plan.is_direct for plan in plans) == (num_tokens <= 64 and not is_fp8)


def all_rounds(untuned: Plan, num_tokens: int, num_experts: int, top_k: int, has_pdl: bool) -> list[list[Tactic]]:
    """Every round of a search in which later tactics are faster."""
    measured: dict[Tactic, float] = {}
    rounds = []
    while batch := proposals(untuned, num_tokens, num_experts, top_k, measured, has_pdl=has_pdl):
        rounds.append(list(batch))
        measured |= {tactic: 1.0 / (1 + len(measured) + position) for position, tactic in enumerate(batch)}
    return rounds


def test_a_search_tries_few_plans_that_fit(subtests: pytest.Subtests) -> None:
    tokens = (1, 4, 8, 16, 64, 256, 1024, 4096)
    for (num_experts, top_k), num_tokens, has_pdl in itertools.product(SHAPES, tokens, (True, False)):
        with subtests.test(num_experts=num_experts, num_tokens=num_tokens, has_pdl=has_pdl):
            check_search(num_tokens, num_experts, top_k, has_pdl)


def check_search(num_tokens: int, num_experts: int, top_k: int, has_pdl: bool) -> None:
    shape = LayerShape(
        arch="sm70", format_name="mxfp4", num_experts=num_experts, top_k=top_k,
        hidden_size=2880, intermediate_size=2880,
    )  # fmt: skip
    untuned = plans_for(shape).pick(num_tokens)
    first, *later = all_rounds(untuned, num_tokens, num_experts, top_k, has_pdl)
    assert first[0] == plan_text(untuned)
    assert len(later) <= 1
    tactics = [tactic for batch in (first, *later) for tactic in batch]
    assert 2 <= len(tactics) == len(set(tactics)) <= 11
    plans = [plan_from_text(tactic) for tactic in tactics]
    assert all(not plan.is_direct or num_tokens * top_k <= MAX_DIRECT_SLOTS for plan in plans)
    assert has_pdl or not any(plan.pdl for plan in plans)
    if num_tokens * top_k > 512:
        assert not any(plan.is_direct for plan in plans)


def test_the_second_round_lies_around_the_best_of_the_first() -> None:
    first = proposals(DIRECT, 64, 32, 4, {}, has_pdl=True)
    for best in first:
        measured = {tactic: 2.0 - (tactic == best) for tactic in first}
        plan = plan_from_text(best)
        for tactic in proposals(DIRECT, 64, 32, 4, measured, has_pdl=True):
            neighbour = plan_from_text(tactic)
            assert neighbour.is_direct == plan.is_direct
            assert neighbour != plan
    partly = {first[0]: 1.0}
    assert proposals(DIRECT, 64, 32, 4, partly, has_pdl=True) == first[1:]


@rows("num_tokens, splits", (1, {1, 2, 4}), (4, {1, 2, 4}), (5, {1}), (64, {1}))
def test_the_first_matrix_is_split_for_few_slots(num_tokens: int, splits: set[int]) -> None:
    rounds = all_rounds(replace(DIRECT, block_m=8), num_tokens, 32, 4, True)
    plans = [plan_from_text(tactic) for batch in rounds for tactic in batch]
    assert {plan.split_k_1 for plan in plans} == splits


def test_the_backend_offers_its_own_plan_first_and_keeps_its_weights() -> None:
    config = rank_config(num_experts=4, hidden_size=64, intermediate_size=64, top_k=2)
    backend = TritonBackend()
    info = backend.prepare(hostile.plain_experts("bf16", 4, 64, 64), config, Topology())
    first = backend.tactics(info, config, 8, {})
    assert first[0] == plan_text(info.plans.pick(8))
    tuned = backend.with_choice(info, {"8": first[-1]})
    assert isinstance(tuned, TritonMoeQuantInfo)
    assert tuned.layer is info.layer
    assert plan_text(tuned.plans.pick(3)) == first[-1]


@rows("major, has_pdl", (8, False), (9, True), (12, True))
def test_early_starts_are_tried_from_hopper_on(monkeypatch: pytest.MonkeyPatch, major: int, has_pdl: bool) -> None:
    config = rank_config(num_experts=4, hidden_size=64, intermediate_size=64, top_k=2)
    w13, w2 = (Bf16Weight(part.to(torch.bfloat16)) for part in hostile.dense_experts(4, 64, 64))
    info = TritonBackend().prepare(ExpertWeights(w13=w13, w2=w2), config, Topology())
    info = replace(info, topology=Topology(device=torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    plans = [plan_from_text(tactic) for tactic in TritonBackend().tactics(info, config, 8, {})]
    assert any(plan.pdl for plan in plans) is has_pdl
