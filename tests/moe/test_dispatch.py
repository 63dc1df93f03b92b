"""The standard dispatcher: nothing moves, and a sum over ranks is taken once if it is needed, never otherwise."""

import pytest
import torch

from moe import MoeConfigError, StandardCombineInput
from moe.dispatch.standard import StandardDispatcher
from tests.moe.moe_layers import random_topk


def test_dispatch_moves_nothing() -> None:
    x, topk = torch.randn(3, 8), random_topk(3, 4)
    dispatched = StandardDispatcher().dispatch(x, topk)
    assert (dispatched.hidden_states is x, dispatched.topk_output is topk, dispatched.num_tokens) == (True, True, 3)


def test_a_complete_result_is_never_reduced() -> None:
    x = torch.randn(3, 8)
    dispatcher = StandardDispatcher(reduce=lambda part: pytest.fail("reduced"))
    assert dispatcher.combine(StandardCombineInput(x)) is x
    empty = dispatcher.dispatch(torch.empty(0, 8), random_topk(1, 4)).result(torch.empty(0, 8), is_partial=False)
    assert dispatcher.combine(empty).shape == (0, 8)


def test_a_partial_result_is_reduced_once_or_refused_without_reduce() -> None:
    partial = StandardCombineInput(torch.ones(3, 8), is_partial=True)
    assert torch.equal(StandardDispatcher(reduce=lambda part: part + 10).combine(partial), torch.full((3, 8), 11.0))
    with pytest.raises(MoeConfigError, match="no reduce"):
        StandardDispatcher().combine(partial)
