"""Launch plans as tactics: their text, the tables made of them, and that a search compiles few and fitting ones."""

from dataclasses import replace

import pytest
import torch

from moe import MoeConfigError, Topology
from moe.backend import Tactic
from moe.backends.triton.backend import TritonBackend, TritonMoeQuantInfo
from moe.backends.triton.plans import LayerShape, PlanTable, plans_for
from moe.backends.triton.tactics import plan_from_text, plan_text, proposals, table_of
from moe.kernels.plan import Plan
from tests.moe.backends import hostile
from tests.moe.configs import rank_config
from tests.tables import rows

DIRECT = Plan(is_direct=True, block_m=16, block_n_1=64, block_n_2=128, split_k=2, pdl=True)
GROUPED = Plan(is_direct=False, block_m=64, block_n_1=128, block_n_2=128, num_tile_heights=3)
FP8 = replace(GROUPED, fp8_activations=True)
UNTUNED = PlanTable(((16, replace(DIRECT, split_k=1)), (None, replace(GROUPED, num_tile_heights=1))))


def test_text_round_trip() -> None:
    assert plan_text(DIRECT) == "is_direct=1,block_m=16,block_n_1=64,block_n_2=128,split_k=2,pdl=1"
    assert plan_text(replace(DIRECT, split_k_1=4)).endswith("split_k=2,split_k_1=4,pdl=1")
    for plan in (DIRECT, replace(DIRECT, split_k_1=4), GROUPED, FP8, *(plan for _, plan in UNTUNED.steps)):
        assert plan_from_text(plan_text(plan)) == plan


@rows(
    "text, words",
    ("", "is no field and number"),
    ("is_direct=1", "is no launch plan"),
    ("is_direct=1,block_m=16,block_n_1=64,block_n_2=64,depth=2", "'depth=2' is no field"),
    ("is_direct=1,block_m=-8,block_n_1=64,block_n_2=64", "'block_m=-8' is no field"),
    ("is_direct=1,block_m=²,block_n_1=64,block_n_2=64", "'block_m=²' is no field"),
    (f"is_direct=1,block_m={'9' * 5000},block_n_1=64,block_n_2=64", "is no field and number"),
    ("is_direct=1,block_m=12,block_n_1=64,block_n_2=64", "power of two"),
    ("is_direct=0,block_m=16,block_n_1=64,block_n_2=64,split_k=2", "belong to direct plans"),
)
def test_other_texts_are_refused(text: str, words: str) -> None:
    with pytest.raises(MoeConfigError, match=words):
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


def tried(untuned: Plan, num_tokens: int, num_experts: int, top_k: int, has_pdl: bool = True) -> list[Plan]:
    """What a search of at most two rounds tries if later tactics are faster."""
    tactics: list[Tactic] = []
    for _ in range(3):
        measured = {tactic: 1.0 / (1 + position) for position, tactic in enumerate(tactics)}
        batch = proposals(untuned, num_tokens, num_experts, top_k, measured, has_pdl=has_pdl)
        tactics += batch
    assert not batch, "a third round"
    return [plan_from_text(tactic) for tactic in tactics]


@rows("is_fp8", True, False)
@rows("num_tokens", 8, 64, 1024, 4096)
def test_precision_is_the_untuned_plans(is_fp8: bool, num_tokens: int) -> None:
    plans = tried(replace(GROUPED, fp8_activations=is_fp8), num_tokens, 256, 8)
    assert len(plans) > 2
    assert all(plan.fp8_activations == is_fp8 for plan in plans)
    assert any(plan.is_direct for plan in plans) == (num_tokens <= 64 and not is_fp8)


@rows("num_experts, top_k", (32, 4), (128, 4), (64, 8), (4, 2), (1, 1))
@rows("num_tokens", 1, 4, 8, 16, 64, 256, 1024, 4096)
@rows("has_pdl", True, False)
def test_a_search_tries_few_plans_that_fit(num_experts: int, top_k: int, num_tokens: int, has_pdl: bool) -> None:
    shape = LayerShape(
        arch="sm70", format_name="mxfp4", num_experts=num_experts, top_k=top_k,
        hidden_size=2880, intermediate_size=2880,
    )  # fmt: skip
    untuned = plans_for(shape).pick(num_tokens)
    plans = tried(untuned, num_tokens, num_experts, top_k, has_pdl)
    assert plans[0] == untuned
    assert 2 <= len(plans) == len(set(plans)) <= 11
    assert has_pdl or not any(plan.pdl for plan in plans)
    assert num_tokens * top_k <= 512 or not any(plan.is_direct for plan in plans)


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
    assert {plan.split_k_1 for plan in tried(replace(DIRECT, block_m=8), num_tokens, 32, 4)} == splits


CONFIG = rank_config(num_experts=4, hidden_size=64, intermediate_size=64, top_k=2)


@pytest.fixture
def info() -> TritonMoeQuantInfo:
    return TritonBackend().prepare(hostile.plain_experts("bf16", 4, 64, 64), CONFIG, Topology())


def test_the_backend_offers_its_own_plan_first_and_keeps_its_weights(info: TritonMoeQuantInfo) -> None:
    first = TritonBackend().tactics(info, CONFIG, 8, {})
    assert first[0] == plan_text(info.plans.pick(8))
    tuned = TritonBackend().with_choice(info, {"8": first[-1]})
    assert tuned.layer is info.layer
    assert plan_text(tuned.plans.pick(3)) == first[-1]


@rows("major, has_pdl", (8, False), (9, True), (12, True))
def test_early_starts_are_tried_from_hopper_on(
    monkeypatch: pytest.MonkeyPatch, info: TritonMoeQuantInfo, major: int, has_pdl: bool
) -> None:
    on_card = replace(info, topology=Topology(device=torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    plans = [plan_from_text(tactic) for tactic in TritonBackend().tactics(on_card, CONFIG, 8, {})]
    assert any(plan.pdl for plan in plans) is has_pdl
