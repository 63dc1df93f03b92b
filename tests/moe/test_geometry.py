"""A layer's shape, a rank's place, and records of them that cannot contradict each other."""

import dataclasses

import pytest

from moe import ExpertShape, MoeConfigError, MoeRunnerConfig, RankPlace, RoutingConfig, RoutingMethod, Topology
from moe.backends.torch.backend import TorchBackend
from moe.formats import ExpertWeights
from moe.topology import check_fit
from tests.moe.backends.hostile import shard
from tests.moe.moe_layers import make_experts
from tests.tables import rows

SHAPE = ExpertShape(num_experts=8, top_k=2, hidden_size=64, intermediate_size=288)
RANK = Topology(tp_size=4, tp_rank=3, ep_size=2, ep_rank=1)


def own_part() -> ExpertWeights:
    """Of the last rank: 288 columns are nine blocks of 32, three a rank, so the fourth has none."""
    return shard(make_experts("mxfp4", num_experts=8, inter=288), tp=(4, 3), ep=(2, 1))


def test_local_sizes_follow_from_shape_and_place() -> None:
    config = MoeRunnerConfig(shape=SHAPE, place=RANK.place, scale_block=32)
    assert (config.num_experts, config.num_local_experts, config.top_k) == (8, 4, 2)
    assert (config.hidden_size, config.intermediate_size) == (64, 96)
    assert [dataclasses.replace(config, scale_block=block).intermediate_size for block in (1, 128)] == [72, 128]
    assert (RANK.num_ranks, RANK.is_partial, RANK.expert_range(8)) == (8, True, range(4, 8))
    assert [Topology(**sizes).is_partial for sizes in ({}, {"tp_size": 2}, {"ep_size": 2})] == [False, True, True]
    assert RANK.cut(288, 32).length == 0
    assert Topology.at(RANK.place) == dataclasses.replace(RANK)


@rows("field, value", ("num_experts", 0), ("top_k", 9), ("hidden_size", 0))
def test_impossible_shapes_are_refused(field: str, value: int) -> None:
    with pytest.raises(MoeConfigError, match=f"{field} is {value}: it must"):
        dataclasses.replace(SHAPE, **{field: value})


@rows(
    "num_experts, top_k, words",
    (16, 2, "num_experts is 8 in the layer's shape but 16 in its routing"),
    (8, 3, "top_k is 2 in the layer's shape but 3 in its routing"),
)
def test_routing_of_another_layer_is_refused(num_experts: int, top_k: int, words: str) -> None:
    routing = RoutingConfig(method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=num_experts, top_k=top_k)
    with pytest.raises(MoeConfigError, match=words):
        MoeRunnerConfig(shape=SHAPE, routing=routing)


def test_experts_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(MoeConfigError, match="ep_size is 3: it must divide the 8 experts"):
        MoeRunnerConfig(shape=SHAPE, place=RankPlace(ep_size=3))


@rows("tp_size, unit, want", (1, 1, range(24)), (2, 4, range(12, 24)), (3, 8, range(16, 24)))
def test_shares_are_whole_units(tp_size: int, unit: int, want: range) -> None:
    place = RankPlace(tp_size=tp_size, tp_rank=tp_size - 1)
    assert place.share("heads", 24, unit) == want
    with pytest.raises(MoeConfigError, match=f"tp_size is {tp_size}: it must divide heads, 25 elements in units of 2"):
        place.share("heads", 25, 2)


def test_weights_settings_and_topology_of_one_rank_fit() -> None:
    """With padding, as the loader cuts them, and without."""
    config = MoeRunnerConfig(shape=SHAPE, place=RANK.place, scale_block=32)
    assert own_part().intermediate_size == 0
    check_fit(own_part(), config, RANK)
    check_fit(make_experts("mxfp4", num_experts=4, inter=96), config, RANK)


@rows(
    "topology, experts, words",
    (dataclasses.replace(RANK, tp_rank=2), None, "tp rank 3 of 4, ep rank 1 of 2, but its topology is tp rank 2"),
    (dataclasses.replace(RANK, ep_rank=0), None, "but its topology is tp rank 3 of 4, ep rank 0 of 2"),
    (Topology(), None, "but its topology is tp rank 0 of 1, ep rank 0 of 1"),
    (RANK, {"num_experts": 8}, "num_experts of this rank is 4 by its settings, but 8 in its weights"),
    (RANK, {"hidden": 32}, "hidden_size of this rank is 64 by its settings, but 32 in its weights"),
    (RANK, {"inter": 64}, "intermediate_size of this rank is 96 by its settings, but 64 in its weights"),
)
def test_what_belongs_to_another_rank_or_layer_is_refused(
    topology: Topology, experts: dict[str, int] | None, words: str
) -> None:
    config = MoeRunnerConfig(shape=SHAPE, place=RANK.place, scale_block=32)
    sizes = {"num_experts": 4, "hidden": 64, "inter": 96} | (experts or {})
    for check in (check_fit, TorchBackend().prepare):
        with pytest.raises(MoeConfigError, match=words):
            check(make_experts("mxfp4", **sizes), config, topology)
