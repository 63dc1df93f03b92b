"""The standard dispatcher: nothing moves, and a sum over ranks is taken once if it is needed, never otherwise."""

from typing import Any

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, MoeConfigError, MoeRunner, StandardCombineInput, Topology
from moe.backends.torch.backend import TorchBackend
from moe.check.reference import reference_moe
from moe.dispatch.standard import StandardDispatcher
from tests.emulators.ranks import Rank, run_ranks
from tests.moe.backends.hostile import shard
from tests.moe.moe_layers import GPT_OSS, make_config, make_experts, random_topk, relative_error
from tests.tables import rows


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


@rows("tp_size, ep_size", (1, 1), (8, 1), (1, 4), (2, 2))
def test_every_rank_gets_the_result_of_one(tp_size: int, ep_size: int) -> None:
    """Bias included once, each part summed once, alone, along both axes and in a square."""
    experts = make_experts("mxfp4", hidden=96, inter=288)
    x, topk = torch.randn(5, 96, generator=torch.Generator().manual_seed(3)), random_topk(5, 4)
    topk.ids[1, 0] = -1
    size = tp_size * ep_size

    def work(rank: Rank) -> torch.Tensor:
        sums: list[torch.Tensor] = []

        def reduce(part: torch.Tensor) -> torch.Tensor:
            sums.append(torch.stack(rank.exchange(part)).sum(0))
            return sums[0]

        tp_rank, ep_rank = divmod(rank.rank(), ep_size)
        own = shard(experts, tp=(tp_size, tp_rank), ep=(ep_size, ep_rank))
        topology = Topology(tp_size=tp_size, tp_rank=tp_rank, ep_size=ep_size, ep_rank=ep_rank)
        config = make_config(own, num_experts=4, place=topology)
        dispatcher = StandardDispatcher(reduce if size > 1 else None)
        runner = MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, config)
        result: Any = runner.run(dispatcher.dispatch(x, topk), TorchBackend().prepare(own, config, topology))
        total = dispatcher.combine(result)
        assert len(sums) == (size > 1)
        return total

    for result in run_ranks(size, work):
        assert relative_error(result, reference_moe(x, topk, experts, GPT_OSS)) < 1e-5
