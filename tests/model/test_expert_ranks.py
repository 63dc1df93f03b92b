"""MoE layers for every (tp, ep): loader, prepare, runner; the ranks' sum equals one rank, shared experts too (B26)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loaders.checkpoint import Checkpoint
from loaders.experts import read_gpt_oss_experts, read_split_experts
from model.config import ModelSettings, ModelSettingsError
from model.families.base import MoeParts
from model.linear import GatedMlp
from model.moe_build import MoeBuilder
from model.moe_layer import MoeLayer
from model.parallel import ParallelLayout
from model.registry import build_model
from moe import Activation, ExpertShape, MoeBackend, MoeRunnerConfig, RankPlace, RoutingConfig, RoutingMethod
from moe.dispatch import transport
from moe.errors import MoeConfigError
from moe.formats import ExpertWeights
from moe.group import RankGroups
from tests.loaders.expert_files import fused_experts, save, split_experts
from tests.model.checkpoints import make_gpt_oss, pack_mxfp4, state_by_file_name, write
from tests.tables import rows

E, H, I, K, T = 8, 64, 288, 3, 11  # 288 is 9 blocks of 32, 18 of 16, and three ragged blocks of 128
SHAPE = ExpertShape(num_experts=E, top_k=K, hidden_size=H, intermediate_size=I)
SIZES = [(2, 1), (8, 1), (1, 4), (4, 2)]  # tp, ep
X = 2 * torch.randn(T, H, generator=torch.Generator().manual_seed(5))
GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
Reduce = Callable[[torch.Tensor], torch.Tensor]


class Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def make_layer(folder: Path, kind: str, place: RankPlace) -> MoeLayer:
    """One rank's layer from the files, through the builder."""
    is_gpt_oss = kind == "gpt_oss"
    g = torch.Generator().manual_seed(9)
    routing = (
        RoutingConfig(method=RoutingMethod.SOFTMAX_AFTER_TOPK, num_experts=E, top_k=K)
        if is_gpt_oss
        else RoutingConfig(
            method=RoutingMethod.SIGMOID_GROUPED, num_experts=E, top_k=K, num_groups=4, num_kept_groups=2,
            routed_scaling_factor=2.5,
        )
    )  # fmt: skip
    config = MoeRunnerConfig(shape=SHAPE, activation=GPT_OSS if is_gpt_oss else Activation(), routing=routing)
    gate, up, down = (torch.randn(size, generator=g) / 8 for size in ((64, H), (64, H), (H, 64)))
    rank, num_ranks = place.ep_rank * place.tp_size + place.tp_rank, place.num_ranks
    own = slice(rank * 64 // num_ranks, (rank + 1) * 64 // num_ranks)
    parts = MoeParts(
        gate_weight_EH=torch.randn(E, H, generator=g),
        correction_bias_E=None if is_gpt_oss else torch.randn(E, generator=g) / 8,
        shared_experts=None if is_gpt_oss else GatedMlp(gate[own], up[own], down[:, own]),
    )
    layout = ParallelLayout(tp_size=num_ranks, ep_size=place.ep_size, rank=rank)
    assert layout.moe_place == place
    settings = ModelSettings(layout=layout, selfcheck="off", moe_backend=MoeBackend.TORCH)
    builder = MoeBuilder(settings=settings, layer=config, groups=RankGroups(world=Group(num_ranks)))  # type: ignore[arg-type]
    builder.resolve(0, "mxfp4" if is_gpt_oss else kind)
    builder.connect()
    return builder.build(0, parts, lambda: read(folder, kind, place))


def read(folder: Path, kind: str, place: RankPlace) -> ExpertWeights:
    reader = read_gpt_oss_experts if kind == "gpt_oss" else read_split_experts
    return reader(Checkpoint.open(folder), "x", SHAPE, place)


@rows("kind", "gpt_oss", "fp8_block", "nvfp4", "bf16", "fp8_tensor")
def test_ranks_sum_to_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    tensors = fused_experts(E, H, I, published=True)[0] if kind == "gpt_oss" else split_experts(kind, E, H, I)[0]
    save(tmp_path, tensors)
    want = make_layer(tmp_path, kind, RankPlace())(X)
    reduced: list[torch.Tensor] = []
    answer = torch.zeros(T, H)

    def reduce(part: torch.Tensor) -> torch.Tensor:
        reduced.append(part.clone())
        return answer

    monkeypatch.setattr(transport, "sum_over", lambda group: reduce)
    for tp, ep in SIZES:
        reduced.clear()
        layers = [
            make_layer(tmp_path, kind, RankPlace(tp_size=tp, tp_rank=t, ep_size=ep, ep_rank=e))
            for t in range(tp)
            for e in range(ep)
        ]
        for layer in layers:
            assert layer(X) is answer, "nothing is added after the one sum over ranks"
        assert len(reduced) == tp * ep
        total = torch.stack(reduced).sum(0)
        error = (total - want).norm() / want.norm()
        assert error < 1e-5, f"tp {tp}, ep {ep}: {float(error)}"
        widths = {layer.runner.config.intermediate_size for layer in layers}
        assert len(widths) == 1, "every rank is laid out for the same padded width"
    assert not reduced[0].equal(want), "a part is not the whole"


def test_experts_of_another_rank_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight experts and four local ones would be a layer that answers with the wrong weights."""
    save(tmp_path, split_experts("bf16", E, H, I)[0])
    whole = read(tmp_path, "bf16", RankPlace())
    monkeypatch.setattr("tests.model.test_expert_ranks.read", lambda folder, kind, place: whole)
    with pytest.raises(MoeConfigError, match="num_experts of this rank is 4 by its settings, but 8 in its weights"):
        make_layer(tmp_path, "bf16", RankPlace(ep_size=2))


def test_fp8_blocks_are_laid_out_for_whole_blocks(tmp_path: Path) -> None:
    """288 columns are three blocks of 128: config, weights and kernels agree on the padded figure."""
    save(tmp_path, split_experts("fp8_block", E, H, I)[0])
    for tp, width in ((1, 384), (2, 256), (4, 128), (8, 128)):
        place = RankPlace(tp_size=tp, tp_rank=tp - 1)
        assert make_layer(tmp_path, "fp8_block", place).runner.config.intermediate_size == width
        assert read(tmp_path, "fp8_block", place).intermediate_size == width


@rows(
    "sizes, group, words",
    ({"dp_size": 3, "ep_size": 3}, Group(3), "expert_parallel_size is 3: it must divide the 4 experts; .* 1 would"),
    ({"tp_size": 3}, Group(3), "tensor_parallel_size is 3: .* the 4 query heads.* the 2 KV .*; 1, 2, 4 would work"),
    ({"tp_size": 2, "ep_size": 2}, None, "size 2 x data_parallel_size 1 needs a process group of 2 ranks"),
    ({"tp_size": 2}, Group(4), "are 2 ranks, but the process group has 4"),
)
def test_impossible_ranks_are_refused_before_any_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], group: Any, words: str
) -> None:
    tensors, _ = pack_mxfp4(state_by_file_name(make_gpt_oss(), tmp_path))
    write(tmp_path, tensors, {"quantization_config": {"quant_method": "mxfp4"}})
    read_names: list[str] = []
    monkeypatch.setattr(Checkpoint, "view", lambda self, name: read_names.append(name))
    with pytest.raises(ModelSettingsError, match=words):
        build_model(tmp_path, ModelSettings(layout=ParallelLayout(**sizes)), group)
    assert not read_names
