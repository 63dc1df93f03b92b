"""Sharding: the arithmetic against golden numbers, and shards of every format put together again equal the whole."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loaders.checkpoint import Checkpoint
from loaders.experts import read_gpt_oss_experts, read_split_experts
from moe import MoeConfigError, MoeRunnerConfig, RankPlace, Topology
from moe.formats import ExpertWeights, Fp8BlockWeight
from moe.topology import check_fit
from tests.loaders.expert_files import FORMATS, fused_experts, save, shape_of, split_experts
from tests.tables import rows

E, H, I = 8, 32, 288  # 288 is 9 blocks of 32, 18 of 16, and three ragged blocks of 128
SIZES = [(1, 1), (2, 1), (8, 1), (1, 4), (4, 2)]  # tp, ep


@rows(
    "size, tp, lengths, padded",
    (2880, 2, [1440, 1440], 1440),
    (2880, 4, [736, 736, 736, 672], 736),
    (2880, 8, [384] * 7 + [192], 384),
    (288, 8, [64] * 4 + [32] + [0] * 3, 64),
)
def test_mxfp4_cuts_of_real_sizes(size: int, tp: int, lengths: list[int], padded: int) -> None:
    cuts = [RankPlace(tp_size=tp, tp_rank=rank).cut(size, 32) for rank in range(tp)]
    assert [cut.length for cut in cuts] == lengths
    assert {cut.padded for cut in cuts} == {padded}


@given(size=st.integers(1, 4000), block=st.sampled_from([1, 16, 32, 128]), tp=st.integers(1, 16))
def test_cuts_tile_the_axis_on_block_borders(size: int, block: int, tp: int) -> None:
    end = 0
    for rank in range(tp):
        cut = RankPlace(tp_size=tp, tp_rank=rank).cut(size, block)
        assert cut.start == end
        assert cut.start % block == 0 or cut.length == 0
        assert 0 <= cut.length <= cut.padded
        assert cut.padded % block == 0
        end = cut.start + cut.length
    assert end == size


@rows("ep", 1, 2, 4, 8)
def test_expert_ranges_tile_the_experts(ep: int) -> None:
    ranges = [RankPlace(ep_size=ep, ep_rank=rank).expert_range(128) for rank in range(ep)]
    assert [e for r in ranges for e in r] == list(range(128))


def test_experts_that_cannot_be_shared_are_refused_with_the_numbers() -> None:
    with pytest.raises(MoeConfigError, match="ep_size is 3: it must divide the 32 experts"):
        RankPlace(ep_size=3).expert_range(32)


@rows(
    "fields, words",
    ({"tp_size": 0}, "tp_size is 0"),
    ({"tp_size": 2, "tp_rank": 2}, r"tp_rank is 2: it must lie in 0\.\.1"),
    ({"ep_rank": -1}, "ep_rank is -1"),
)
def test_ranks_out_of_range_are_refused(fields: dict[str, int], words: str) -> None:
    with pytest.raises(MoeConfigError, match=words):
        RankPlace(**fields)


def read_shard(path: Path, kind: str, place: RankPlace) -> ExpertWeights:
    source = Checkpoint.open(path)
    reader = read_gpt_oss_experts if kind.startswith("gpt_oss") else read_split_experts
    experts = reader(source, "x", shape_of(E, H, I), place)
    source.finish()
    return experts


def write(path: Path, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    if kind.startswith("gpt_oss"):
        tensors, meant = fused_experts(E, H, I, published=kind == "gpt_oss")
        w13, w2 = meant["w13"], meant["w2"]
    else:
        tensors, w13, w2 = split_experts(kind, E, H, I)
    save(path, tensors)
    return w13, w2


@rows("kind, sizes", *[(kind, SIZES) for kind in (*FORMATS, "gpt_oss", "gpt_oss_dense")] + [("gpt_oss", [(8, 8)])])
def test_shards_put_together_equal_the_whole(tmp_path: Path, kind: str, sizes: list[tuple[int, int]]) -> None:
    """B26: for pairs of tensor- and expert-parallel sizes; what lies beyond a rank's own elements is zero."""
    w13, w2 = write(tmp_path, kind)
    block = {"mxfp4": 32, "gpt_oss": 32, "nvfp4": 16, "fp8_block": 128}.get(kind, 1)
    for tp, ep in sizes:
        found_w13, found_w2 = torch.zeros_like(w13), torch.zeros_like(w2)
        for tp_rank, ep_rank in [(t, e) for t in range(tp) for e in range(ep)]:
            place = RankPlace(tp_size=tp, tp_rank=tp_rank, ep_size=ep, ep_rank=ep_rank)
            experts = read_shard(tmp_path, kind, place)
            cut, mine = place.cut(I, block), place.expert_range(E)
            assert (experts.num_experts, experts.intermediate_size) == (E // ep, cut.padded)
            config = MoeRunnerConfig(shape=shape_of(E, H, I), place=place, scale_block=block)
            check_fit(experts, config, Topology.at(place))
            gate, up = experts.w13.dequantize().split(cut.padded, 1)
            down, own = experts.w2.dequantize(), slice(cut.start, cut.start + cut.length)
            assert not any(
                part.any() for part in (gate[:, cut.length :], up[:, cut.length :], down[:, :, cut.length :])
            )
            found_w13[mine.start : mine.stop, own] = gate[:, : cut.length]
            found_w13[mine.start : mine.stop, I:][:, own] = up[:, : cut.length]
            found_w2[mine.start : mine.stop, :, own] = down[:, :, : cut.length]
        assert torch.equal(found_w13, w13)
        assert torch.equal(found_w2, w2)


def test_blocks_of_padding_have_a_scale_of_one(tmp_path: Path) -> None:
    """Their codes are 0, but kernels divide by a block's scale or take its logarithm."""
    write(tmp_path, "fp8_block")
    shard = RankPlace(tp_size=2, tp_rank=1)  # holds the last of three blocks, and one of padding
    experts = read_shard(tmp_path, "fp8_block", shard)
    assert isinstance(experts.w13, Fp8BlockWeight)
    assert isinstance(experts.w2, Fp8BlockWeight)
    gate_and_up_E2B = experts.w13.scale_inv[..., 0].unflatten(1, (2, 2))
    assert (gate_and_up_E2B[..., 1] == 1).all()
    assert (gate_and_up_E2B[..., 0] != 1).all()
    assert (experts.w2.scale_inv[..., 1] == 1).all()


@rows("kind", "gpt_oss", "gpt_oss_dense")
def test_biases_are_cut_like_their_rows_and_the_down_bias_stays_whole(tmp_path: Path, kind: str) -> None:
    tensors, meant = fused_experts(E, H, I, published=kind == "gpt_oss")
    save(tmp_path, tensors)
    place = RankPlace(tp_size=2, tp_rank=1, ep_size=4, ep_rank=3)
    experts = read_shard(tmp_path, kind, place)
    cut = place.cut(I, 32 if kind == "gpt_oss" else 1)
    assert experts.b2 is not None
    gate, up = experts.b13.split(cut.padded, 1)
    assert torch.equal(gate[:, : cut.length], meant["b13"][6:8, cut.start : I])
    assert torch.equal(up[:, : cut.length], meant["b13"][6:8, I + cut.start :])
    assert not gate[:, cut.length :].any()
    assert torch.equal(experts.b2, meant["b2"][6:8])


def test_scalar_scales_do_not_depend_on_the_rank(tmp_path: Path) -> None:
    """A rank whose own experts agree still gets per-half scales, and the layer's largest input scale."""
    tensors, _, _ = split_experts("nvfp4", E, H, I)
    for e in range(E):
        for name in ("gate_proj", "up_proj"):
            tensors[f"x.{e}.{name}.weight_scale_2"] = torch.tensor(1.0 if e < 7 or name == "up_proj" else 2.0)
    tensors["x.7.up_proj.input_scale"] = tensors["x.7.gate_proj.input_scale"] = torch.tensor(9.0)
    del tensors["x.0.gate_proj.input_scale"], tensors["x.0.up_proj.input_scale"]
    save(tmp_path, {name: tensor.clone() for name, tensor in tensors.items()})
    first = read_shard(tmp_path, "nvfp4", RankPlace(ep_size=4, ep_rank=0)).w13
    assert first.scale_2.tolist() == [[1.0, 1.0], [1.0, 1.0]]  # type: ignore[attr-defined]
    assert first.input_scale.tolist() == [9.0, 0.5]  # type: ignore[attr-defined]


@rows("kind", "nvfp4", "fp8_tensor")
@rows("rank", 0, 3)
def test_every_expert_keeps_its_own_scales_on_every_rank(tmp_path: Path, kind: str, rank: int) -> None:
    """Section G: a wrong local slice of the scalar scales shows on ranks above 0 alone."""
    tensors, _, _ = split_experts(kind, E, H, I)
    scale = "weight_scale_2" if kind == "nvfp4" else "weight_scale"
    for e in range(E):
        for number, name in enumerate(("gate_proj", "up_proj", "down_proj")):
            tensors[f"x.{e}.{name}.{scale}"] = torch.tensor(1.0 + e + (64 if number == 2 else 16 * number))
            tensors[f"x.{e}.{name}.input_scale"] = torch.tensor(0.5 + e + (32 if number == 2 else 0))
    save(tmp_path, tensors)
    experts = read_shard(tmp_path, kind, RankPlace(ep_size=4, ep_rank=rank))
    field = "scale_2" if kind == "nvfp4" else "scale"
    first, second = 2 * rank, 2 * rank + 1
    assert getattr(experts.w13, field).tolist() == [[1.0 + e, 17.0 + e] for e in (first, second)]
    assert getattr(experts.w2, field).tolist() == [65.0 + e for e in (first, second)]
    assert experts.w13.input_scale.tolist() == [0.5 + e for e in (first, second)]  # type: ignore[attr-defined]
    assert experts.w2.input_scale.tolist() == [32.5 + e for e in (first, second)]  # type: ignore[attr-defined]


@rows("kind", "nvfp4", "fp8_tensor")
def test_every_rank_knows_the_largest_input_scales_of_the_layer(tmp_path: Path, kind: str) -> None:
    """Kernels with one activation scale for all experts need it; an expert without a scale counts as the largest."""
    tensors, _, _ = split_experts(kind, E, H, I)
    tensors["x.7.up_proj.input_scale"] = torch.tensor(9.0)
    tensors["x.2.down_proj.input_scale"] = torch.tensor(3.0)
    del tensors["x.0.down_proj.input_scale"]
    save(tmp_path, tensors)
    for place in (RankPlace(), *(RankPlace(tp_size=2, ep_size=4, ep_rank=rank) for rank in range(4))):
        assert read_shard(tmp_path, kind, place).layer_input_scales == (9.0, 3.0)
    for name in [name for name in tensors if name.endswith("down_proj.input_scale")]:
        del tensors[name]
    save(tmp_path, tensors)  # half of the scales serve no kernel
    assert read_shard(tmp_path, kind, RankPlace()).layer_input_scales is None


@rows("kind", "bf16", "fp8_block", "mxfp4")
def test_formats_without_static_scales_have_no_layer_scale(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    assert read_shard(tmp_path, kind, RankPlace(ep_size=2)).layer_input_scales is None


def test_only_this_ranks_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "bf16")
    seen: list[str] = []
    original = Checkpoint.view
    monkeypatch.setattr(Checkpoint, "view", lambda self, name: (seen.append(name), original(self, name))[1])
    read_shard(tmp_path, "bf16", RankPlace(ep_size=4, ep_rank=1))
    assert {name.split(".")[1] for name in seen} == {"2", "3"}
