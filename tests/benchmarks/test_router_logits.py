"""What the record of router logits counts."""

import pytest
import torch

from benchmarks.router_logits import DEEPSEEK, Difference, compare, difference, prompts
from moe.types import StandardTopK


def topk(ids: list[list[int]], weights: list[list[float]]) -> StandardTopK:
    return StandardTopK(torch.tensor(weights), torch.tensor(ids, dtype=torch.int32))


def test_experts_order_and_weights_are_counted_apart() -> None:
    first = topk([[0, 1], [0, 1], [2, 3], [1, 2]], [[0.6, 0.4]] * 4)
    same_order = [[0, 1], [1, 0], [2, 5], [1, 2]]  # as it was, turned round, another expert, other weights
    second = topk(same_order, [[0.6, 0.4], [0.6, 0.4], [0.6, 0.4], [0.7, 0.3]])
    got = difference(first, second, 8)
    assert got == Difference(
        tokens_with_other_experts=0.25,
        slots_with_other_experts=0.125,
        tokens_in_another_order=0.25,
        mean_weight_moved=pytest.approx((0.2 + 0.4 + 0.1) / 4),  # type: ignore[arg-type]
        worst_weight_moved=pytest.approx(0.4),  # type: ignore[arg-type]
    )
    assert difference(first, first, 8).mean_weight_moved == 0


def test_logits_that_bf16_holds_change_nothing_and_near_ties_do() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.eye(256)[:4].bfloat16()
    weight = torch.randn(256, 256, generator=g)
    exact = compare(weight.bfloat16(), None, None, x, DEEPSEEK, g)["bf16_logits"]
    assert set(exact.values()) == {0.0}
    near_ties = compare(weight * 1e-4 + 1, None, None, x, DEEPSEEK, g)["bf16_logits"]
    assert near_ties["tokens_with_other_experts"] == 1.0


def test_prompts_come_from_every_file_in_turn() -> None:
    questions = [messages[0]["content"] for messages in prompts(18)]
    assert len(questions) == len(set(questions)) == 18
