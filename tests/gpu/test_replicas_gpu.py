"""Counts and slots of routed tokens on a card: in the router's kernel and in their own, and inside CUDA graphs."""

import pytest
import torch

from moe.config import RoutingConfig, RoutingMethod
from moe.kernels import replicas, router
from moe.placement import plan_placement
from moe.replicas import ExpertTables, count_and_place, slot_table
from moe.routing import StandardTopK, route

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
E, K, HIDDEN = 32, 4, 2880
CONFIG = RoutingConfig(method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=E, top_k=K)


def make_tables() -> ExpertTables:
    placement = plan_placement([1 + 40 * (expert < 3) for expert in range(E)], 4, 10)
    return ExpertTables(torch.zeros(E, dtype=torch.int64, device=DEVICE), slot_table(placement, E).to(DEVICE))


def small_integers(*shape: int) -> torch.Tensor:
    """Sums are exact, so ties are ties."""
    return torch.randint(-2, 3, shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(sum(shape)))


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 1025])
def test_both_kernels_do_as_torch_does(num_tokens: int) -> None:
    x, weight = small_integers(num_tokens, HIDDEN).bfloat16(), small_integers(E, HIDDEN).bfloat16()
    live = torch.tensor([num_tokens // 2 + 3], dtype=torch.int32, device=DEVICE)
    chosen = route(x.double() @ weight.double().T, CONFIG)
    fused, own, reference = make_tables(), make_tables(), make_tables()
    want = count_and_place(chosen, reference, live, 3)
    got = router.route(x, weight, None, CONFIG, tables=fused, num_live=live, first_token=3)
    assert torch.equal(got.ids, want.ids)
    assert torch.equal(replicas.count_and_place(chosen, own, live, 3).ids, want.ids)
    assert torch.equal(fused.load_E, reference.load_E)
    assert torch.equal(own.load_E, reference.load_E)


def test_a_captured_step_counts_live_tokens_and_follows_the_table() -> None:
    tables = make_tables()
    x, weight = small_integers(8, HIDDEN).bfloat16(), small_integers(E, HIDDEN).bfloat16()
    live = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def step() -> StandardTopK:
        return router.route(x, weight, None, CONFIG, tables=tables, num_live=live)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        placed = step()
    assert tables.load_E is not None
    assert tables.slots_CE is not None
    assert not tables.load_E.any(), "no token is live while a step is captured"
    for num_live in (8, 3, 0):
        live.fill_(num_live)
        graph.replay()
    assert int(tables.load_E.sum()) == (8 + 3) * K
    moved = slot_table(plan_placement([1 + 40 * (expert > 20) for expert in range(E)], 4, 10), E).to(DEVICE)
    tables.slots_CE.copy_(moved)
    graph.replay()
    want = count_and_place(route(x.double() @ weight.double().T, CONFIG), ExpertTables(None, moved))
    assert torch.equal(placed.ids, want.ids)
