"""Processed experts that change places between two ranks: with the ids changed alike, the sum of both is as before."""

import pytest
import torch

from moe import MoeRunner, StandardDispatchOutput, Topology
from moe.errors import UnsupportedPathError
from moe.registry import load_backend
from moe.routing import StandardTopK
from tests.interpreter import RunInterpreted, waits_for_interpreter
from tests.moe.backends import contract, hostile
from tests.moe.backends.contract import NONE, PATHS, E, K, Path
from tests.tables import rows

MOVABLE = tuple(path for path in PATHS if load_backend(path.backend).can_move_experts)
SWAPPED = {1: E // 2 + 2, E // 2 + 2: 1}  # the second expert of the first rank, the third of the second


@rows("path", *MOVABLE)
def test_two_experts_change_places(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    emulator = contract.install(monkeypatch, path.backend, path.arch)
    backend, experts = load_backend(path.backend), contract.make_experts(path, 2)
    ranks = []
    for rank in range(2):
        topology = Topology(ep_size=2, ep_rank=rank)
        own = contract.shard(path, experts, topology)
        config = contract.config_of(path, experts, topology)
        ranks.append((MoeRunner(path.backend, NONE, config), backend.prepare(own, config, topology)))
    x, topk = contract.tokens(path), hostile.routing(contract.T, E, K)

    def both(ids: torch.Tensor) -> torch.Tensor:
        dispatched = StandardDispatchOutput(x, StandardTopK(topk.weights, ids))
        return sum(contract.exact(path, emulator, runner.run(dispatched, info)).clone() for runner, info in ranks)

    before = both(topk.ids)
    (_, first), (_, second) = ranks
    parts = [[part.clone() for part in backend.expert_parts(*each)] for each in ((first, 1), (second, 2))]
    backend.put_expert(first, 1, parts[1])
    backend.put_expert(second, 2, parts[0])
    moved = topk.ids.clone()
    for expert, place in SWAPPED.items():
        moved[topk.ids == expert] = place
    assert hostile.relative_error(both(moved), before) < 1e-6
    assert hostile.relative_error(both(topk.ids), before) > 0.1, "the experts differ"


def test_most_backends_can_and_the_others_say_that_they_cannot() -> None:
    assert {path.backend for path in MOVABLE} >= {contract.TORCH, contract.DEEP_GEMM, contract.MXFP4}
    with pytest.raises(UnsupportedPathError, match=r"aiter cannot exchange processed experts .* leave enable_eplb off"):
        load_backend(contract.AITER).expert_parts(object(), 0)


@waits_for_interpreter
def test_our_own_kernels_in_the_interpreter(run_interpreted: RunInterpreted) -> None:
    """MXFP4 with another largest scale on each rank, whose factors therefore differ."""
    errors = run_interpreted("tests.moe.kernels.interpreted_moves")
    assert len(errors) == 2
    assert {name: error for name, error in errors.items() if not error < 1e-2} == {}
