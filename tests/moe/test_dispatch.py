"""The standard dispatcher: nothing moves, and a sum over ranks is taken once if it is needed, never otherwise."""

import threading
from collections.abc import Callable

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, MoeConfigError, MoeRunner, StandardCombineInput, Topology
from moe.backends.torch.backend import TorchBackend
from moe.check.reference import reference_moe
from moe.dispatch.standard import StandardDispatcher
from tests.moe.moe_layers import GPT_OSS, make_config, make_experts, random_topk, relative_error, shard
from tests.tables import rows


class Ranks:
    """All-reduce over threads that play the ranks; counts its calls."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.parts: list[torch.Tensor] = []
        self.calls = 0

    def reduce(self, part: torch.Tensor) -> torch.Tensor:
        self.parts.append(part)
        self.calls += 1
        self.barrier.wait()
        return torch.stack(self.parts).sum(0)


def in_threads(size: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)


def test_dispatch_moves_nothing() -> None:
    x, topk = torch.randn(3, 8), random_topk(3, 4)
    dispatched = StandardDispatcher().dispatch(x, topk)
    assert dispatched.hidden_states is x
    assert dispatched.topk_output is topk
    assert dispatched.num_tokens == 3


def test_a_complete_result_is_never_reduced() -> None:
    x = torch.randn(3, 8)
    dispatcher = StandardDispatcher(reduce=lambda part: pytest.fail("reduced"))
    assert dispatcher.combine(StandardCombineInput(x)) is x
    empty = dispatcher.dispatch(torch.empty(0, 8), random_topk(1, 4)).result(torch.empty(0, 8), is_partial=False)
    assert dispatcher.combine(empty).shape == (0, 8)


def test_a_partial_result_is_reduced_once() -> None:
    dispatcher = StandardDispatcher(reduce=lambda part: part + 10)
    got = dispatcher.combine(StandardCombineInput(torch.ones(3, 8), is_partial=True))
    assert torch.equal(got, torch.full((3, 8), 11.0))


def test_a_partial_result_without_reduce_is_refused() -> None:
    with pytest.raises(MoeConfigError, match="no reduce"):
        StandardDispatcher().combine(StandardCombineInput(torch.ones(3, 8), is_partial=True))


@rows("tp_size, ep_size", (1, 1), (8, 1), (1, 4), (2, 2))
def test_every_rank_gets_the_result_of_one(tp_size: int, ep_size: int) -> None:
    """Bias included once, each part summed once, alone, along both axes and in a square."""
    experts = make_experts("mxfp4", hidden=96, inter=288)
    x, topk = torch.randn(5, 96, generator=torch.Generator().manual_seed(3)), random_topk(5, 4)
    topk.ids[1, 0] = -1
    size = tp_size * ep_size
    ranks, results = Ranks(size), [torch.empty(0)] * size

    def work(rank: int) -> None:
        tp_rank, ep_rank = divmod(rank, ep_size)
        own = shard(experts, tp=(tp_size, tp_rank), ep=(ep_size, ep_rank))
        topology = Topology(tp_size=tp_size, tp_rank=tp_rank, ep_size=ep_size, ep_rank=ep_rank)
        config = make_config(own, num_experts=4, place=topology)
        dispatcher = StandardDispatcher(ranks.reduce if size > 1 else None)
        runner = MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, config)
        result = runner.run(dispatcher.dispatch(x, topk), TorchBackend().prepare(own, config, topology))
        results[rank] = dispatcher.combine(result)  # type: ignore[arg-type]

    in_threads(size, work)
    assert ranks.calls == (size if size > 1 else 0)
    for result in results:
        assert relative_error(result, reference_moe(x, topk, experts, GPT_OSS)) < 1e-5
