"""What tuning measures with and how it judges: tokens, rows that are compared, errors that may not drown, memory."""

import math

import pytest
import torch

from moe import MoeA2ABackend, MoeBackend, MoeRunner, Topology
from moe.config import DispatchFormat
from moe.registry import load_backend
from moe.tune import measure as tuning_measure
from moe.tune.measure import Measurer, _largest_error, _new_memory_is_nan
from tests.moe.backends import hostile
from tests.moe.moe_layers import make_config, make_experts
from tests.moe.tunable import install_profiles
from tests.tables import rows


def test_an_error_may_not_drown_in_other_tokens_nor_in_other_outputs() -> None:
    want = torch.ones(400, 256)
    want[:, 128:] = 0.01
    assert _largest_error(want, want) == 0
    for part in ((17,), (slice(None), slice(128, None))):
        got = want.clone()
        got[part] *= 2
        assert _largest_error(got, want) == pytest.approx(1)


def test_nan_is_an_infinite_error_and_where_nothing_is_expected_nothing_may_come() -> None:
    want = torch.zeros(3, 128)
    assert _largest_error(want, want) == 0
    assert _largest_error(want + 1e-6, want) == math.inf
    unwritten = torch.ones(3, 128)
    unwritten[2, 5] = math.nan
    assert _largest_error(unwritten, torch.ones(3, 128)) == math.inf


@rows("was_on", False, True)
def test_memory_that_a_tactic_allocates_holds_no_former_results(was_on: bool) -> None:
    torch.use_deterministic_algorithms(was_on)
    try:
        with _new_memory_is_nan():
            assert torch.empty(1000).isnan().all()
        assert torch.are_deterministic_algorithms_enabled() is was_on
    finally:
        torch.use_deterministic_algorithms(False)


@rows("ep_rank", *range(4))
def test_few_tokens_differ_from_call_to_call_and_the_first_visits_this_rank(ep_rank: int) -> None:
    topology = Topology(ep_size=4, ep_rank=ep_rank)
    experts = hostile.shard(make_experts("mxfp4", num_experts=16), ep=(4, ep_rank))
    config = make_config(experts, num_experts=16, dtype=torch.float32, place=topology)
    runner = MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, config)
    info = load_backend(MoeBackend.TORCH).prepare(experts, config, topology)
    measurer = Measurer(runner, info, experts, topology)
    own = set(topology.expert_range(16))
    chosen = [measurer._tokens(1, seed)[1].ids[0].tolist() for seed in range(8)]
    assert all(own & set(ids) for ids in chosen)
    assert own <= {expert for ids in chosen for expert in ids}, "always the same experts would stay in the L2"
    ids = measurer._tokens(64, 0)[1].ids.tolist()
    assert all(len(set(row)) == len(row) for row in ids)
    assert {expert for row in ids for expert in row} == set(range(16))


def test_of_many_tokens_the_compared_ones_are_spread_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    profiled = install_profiles(monkeypatch, {})
    monkeypatch.setattr(tuning_measure, "_CHECKED_TOKENS", 2)
    profiled.wrong.add(3)  # in the last token
    experts = hostile.quantized_experts("bf16", 4, 256, 128, x=hostile.tokens(8, 256))
    config = hostile.make_config(4, 256, 128, 3)
    runner = MoeRunner(MoeBackend.FLASHINFER_CUTLASS, MoeA2ABackend.NONE, config)
    info = load_backend(runner.backend).prepare(experts, config, Topology())
    measurer = Measurer(runner, info, experts, Topology())
    assert measurer.error("2/-1", 6) <= 1 < measurer.error("3/-1", 6)


def test_every_layout_of_a_transport_is_measured_and_compared() -> None:
    experts = make_experts("mxfp4")
    topology = Topology(a2a=MoeA2ABackend.DEEPEP)
    config = make_config(experts, dtype=torch.float32)
    runner = MoeRunner(MoeBackend.TORCH, MoeA2ABackend.DEEPEP, config)
    info = load_backend(MoeBackend.TORCH).prepare(experts, config, topology)
    inputs = Measurer(runner, info, experts, topology)._inputs_for(5)
    both = [DispatchFormat.DEEPEP_NORMAL, DispatchFormat.DEEPEP_LL]
    assert [entry[0] for entry in inputs.first] == both
    assert [dispatched.format for dispatched in inputs.dispatched[:4]] == both * 2
