"""Where a rank stands in a layout, and layouts that are refused with what would work."""

import re
from pathlib import Path
from typing import Any

import pytest

from loaders.hf_config import read_config
from model.config import ModelSettings, ModelSettingsError
from model.parallel import ParallelLayout
from model.registry import make_family
from moe import MoeA2ABackend, RankPlace
from tests.model.checkpoints import make_gpt_oss
from tests.model.parallel_cases import FOUR, TWO


@pytest.mark.parametrize("sizes", [{}, *TWO.values(), *FOUR.values(), {"tp_size": 2, "dp_size": 3, "ep_size": 3}])
def test_ranks_share_everything_once(sizes: dict[str, int]) -> None:
    num_ranks = ParallelLayout(**sizes).num_ranks
    layouts = [ParallelLayout(**sizes, rank=rank) for rank in range(num_ranks)]
    places = {(each.moe_place.tp_rank, each.moe_place.ep_rank) for each in layouts}
    assert len(places) == num_ranks == layouts[0].moe_place.num_ranks, "every part of the experts is on one rank"
    assert len({(each.tp_rank, each.dp_rank) for each in layouts}) == num_ranks
    assert {each.dense_place.tp_rank for each in layouts} == set(range(layouts[0].tp_size))


def test_neighbours_share_a_request_and_the_experts_of_a_group() -> None:
    layout = ParallelLayout(tp_size=2, dp_size=3, ep_size=3, rank=3)
    assert (layout.tp_rank, layout.dp_rank) == (1, 1)
    assert layout.dense_place == RankPlace(tp_size=2, tp_rank=1)
    assert layout.moe_place == RankPlace(tp_size=2, tp_rank=1, ep_size=3, ep_rank=1)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp_size": 0}, "tensor_parallel_size is 0: it must be at least 1"),
        ({"dp_size": -1}, "data_parallel_size is -1"),
        ({"ep_size": 0}, "expert_parallel_size is 0"),
        ({"tp_size": 4, "ep_size": 3}, "expert_parallel_size is 3: it must divide the 4 ranks .*; 4 gives every rank"),
        ({"ep_size": 2}, "expert_parallel_size is 2: it must divide the 1 ranks"),
        ({"dp_size": 2}, "data_parallel_size is 2 .* set expert_parallel_size to 2; .* start 2 services"),
        ({"tp_size": 2, "dp_size": 2}, "set expert_parallel_size to 4"),
        ({"tp_size": 2, "rank": 2}, r"rank is 2: it must lie in 0\.\.1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ModelSettingsError, match=words):
        ParallelLayout(**sizes)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({}, "moe_a2a_backend is deepep, .* but there is one rank: set it to none, or start several"),
        ({"tp_size": 2}, "expert_parallel_size is 1 on 2 ranks: set it to 2, or moe_a2a_backend to none"),
        ({"tp_size": 2, "dp_size": 2, "ep_size": 2}, "expert_parallel_size is 2 on 4 ranks: set it to 4"),
    ],
)
def test_a_transport_needs_whole_experts_on_several_ranks(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ModelSettingsError, match=words):
        ModelSettings(layout=ParallelLayout(**sizes), moe_a2a_backend=MoeA2ABackend.DEEPEP)
    ModelSettings(layout=ParallelLayout(tp_size=2, dp_size=2, ep_size=4), moe_a2a_backend=MoeA2ABackend.DEEPEP)


@pytest.mark.parametrize(
    ("config", "sizes", "words"),
    [
        ({}, {"tp_size": 3}, "it must divide the 4 query heads, and divide the 2 KV heads .*; 1, 2, 4 would work"),
        ({}, {"tp_size": 8}, "tensor_parallel_size is 8: .* 1, 2, 4 would work"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3}, {"tp_size": 2},
            "the 12 query heads, and divide the 3 KV heads or be a multiple of them; 1, 3, 6, 12 would work",
        ),
        ({"num_local_experts": 6}, {"tp_size": 4, "ep_size": 4}, "divide the 6 experts; with 4 ranks 1, 2 would work"),
    ],
)  # fmt: skip
def test_what_config_json_cannot_share_is_refused(
    tmp_path: Path, config: dict[str, Any], sizes: dict[str, int], words: str
) -> None:
    make_gpt_oss(**config).save_pretrained(tmp_path)
    family = make_family(read_config(tmp_path))
    family.check_layout(ParallelLayout())
    with pytest.raises(ModelSettingsError, match=re.compile(words)):
        family.check_layout(ParallelLayout(**sizes))
