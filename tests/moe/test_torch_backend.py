"""The torch backend: every format, both ways of holding weights, expert id -1, shards, equal bits in every batch."""

import dataclasses
from typing import Any

import pytest
import torch

from moe import (
    Activation,
    BypassedTopK,
    MoeA2ABackend,
    MoeBackend,
    MoeRunner,
    MoeRunnerConfig,
    RoutingConfig,
    RoutingMethod,
    StandardDispatchOutput,
    StandardTopK,
    Topology,
)
from moe.backends.torch.backend import LazyLinears, TorchBackend
from moe.check.reference import reference_moe
from moe.device import Device
from moe.formats import Bf16Weight, ExpertWeights
from moe.routing import TopKOutput, route
from tests.moe.backends.hostile import shard
from tests.moe.moe_layers import (
    DEEPSEEK_V4,
    FORMATS,
    GPT_OSS,
    HAS_FBGEMM,
    PLAIN,
    make_config,
    make_experts,
    random_topk,
    relative_error,
)
from tests.tables import rows

every_format = rows("format_name", *FORMATS)
both_ways = rows("fits", True, False)


def set_memory(monkeypatch: pytest.MonkeyPatch, fits: bool) -> None:
    """With enough of it the weights are dequantized at load, else at each use."""
    monkeypatch.setattr("moe.backends.torch.backend._free_bytes", lambda device: 2**40 if fits else 0)


@rows("num_layers_left, layers, is_dense", (1, 2, True), (3, 3, False), (3, 4, True), (1, 1, False))
def test_weights_are_dequantized_only_where_there_is_room_for_all_layers_that_are_left(
    monkeypatch: pytest.MonkeyPatch, num_layers_left: int, layers: int, is_dense: bool
) -> None:
    """The first layers took what the last ones needed even in their stored form. `layers` fit into the free memory."""
    experts = make_experts("mxfp4")
    dense_bytes = 3 * experts.num_experts * experts.hidden_size * experts.intermediate_size * 4
    monkeypatch.setattr("moe.backends.torch.backend.free_bytes", lambda: layers * dense_bytes)
    config = dataclasses.replace(make_config(experts), num_layers_left=num_layers_left)
    info = TorchBackend().prepare(experts, config, Topology())
    assert isinstance(info.w13, LazyLinears) != is_dense


def run(
    experts: ExpertWeights, config: MoeRunnerConfig, x: torch.Tensor, topk: TopKOutput, info: Any = None
) -> torch.Tensor:
    info = info or TorchBackend().prepare(experts, config, Topology.at(config.place))
    runner = MoeRunner(MoeBackend.TORCH, MoeA2ABackend.NONE, config)
    return runner.run(StandardDispatchOutput(x, topk), info).hidden_states


def inputs(num_tokens: int, hidden: int = 64, seed: int = 3) -> torch.Tensor:
    return torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(seed))


@rows("bias, num_tokens", (True, 1), (True, 37), (False, 2))
@every_format
@both_ways
def test_every_format_agrees_with_the_twin(
    monkeypatch: pytest.MonkeyPatch, format_name: str, fits: bool, bias: bool, num_tokens: int
) -> None:
    set_memory(monkeypatch, fits)
    experts = make_experts(format_name, bias=bias)
    config, x, topk = make_config(experts), inputs(num_tokens), random_topk(num_tokens, 4)
    info = TorchBackend().prepare(experts, config, Topology())
    assert isinstance(info.w13, LazyLinears) != fits
    got = run(experts, config, x, topk, info)
    assert got.dtype == torch.float32
    assert relative_error(got, reference_moe(x, topk, experts, GPT_OSS)) < 1e-5


@rows("activation", PLAIN, GPT_OSS, DEEPSEEK_V4)
@both_ways
def test_bf16_stays_near_the_twin(monkeypatch: pytest.MonkeyPatch, activation: Activation, fits: bool) -> None:
    set_memory(monkeypatch, fits)
    experts = make_experts("mxfp4")
    config = make_config(experts, activation=activation, dtype=torch.bfloat16)
    x, topk = inputs(9).bfloat16(), random_topk(9, 4)
    got = run(experts, config, x, topk)
    assert got.dtype == torch.bfloat16
    assert relative_error(got, reference_moe(x, topk, experts, activation)) < 1e-2


@every_format
@both_ways
def test_minus_one_and_idle_experts_add_zero(monkeypatch: pytest.MonkeyPatch, format_name: str, fits: bool) -> None:
    set_memory(monkeypatch, fits)
    experts = make_experts(format_name)
    x, topk = inputs(40), random_topk(40, 3)  # expert 3 stays idle
    lost = torch.rand(40, 2, generator=torch.Generator().manual_seed(5)) < 0.3
    lost[0], lost[1] = True, torch.tensor([True, False])
    topk.ids[lost] = -1
    poisoned_weights = torch.where(lost, float("nan"), topk.weights)
    config = make_config(experts)
    quant_info = TorchBackend().prepare(experts, config, Topology())
    poison = Bf16Weight(torch.full((4, 256, 64), float("nan"))), Bf16Weight(torch.full((4, 64, 128), float("nan")))
    nan_experts = ExpertWeights(w13=poison[0], w2=poison[1])
    nan_info = TorchBackend().prepare(nan_experts, config, Topology())
    w13, w2 = ([info[e] for e in range(3)] for info in (quant_info.w13, quant_info.w2))
    mixed = dataclasses.replace(quant_info, w13=(*w13, nan_info.w13[3]), w2=(*w2, nan_info.w2[3]))
    got = run(experts, config, x, StandardTopK(poisoned_weights, topk.ids), mixed)
    assert relative_error(got, reference_moe(x, topk, experts, GPT_OSS)) < 1e-5
    assert torch.equal(got[0], torch.zeros(64))


@rows("num_tokens", 1, 5)
def test_a_batch_of_minus_one_is_zero(num_tokens: int) -> None:
    experts = make_experts("mxfp4")
    topk = StandardTopK(torch.full((num_tokens, 2), float("nan")), torch.full((num_tokens, 2), -1, dtype=torch.int32))
    got = run(experts, make_config(experts), inputs(num_tokens) * float("nan"), topk)
    assert torch.equal(got, torch.zeros(num_tokens, 64))


def test_a_token_of_nan_spoils_only_its_own_row() -> None:
    experts = make_experts("mxfp4")
    config, x, topk = make_config(experts), inputs(6), random_topk(6, 4)
    topk.ids[4, 0] = -1
    clean = run(experts, config, x, topk)
    x[2] = float("nan")
    got = run(experts, config, x, topk)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got[others], clean[others])
    assert bool(got[2].isnan().all())


@rows("inter", *[96, 288] if HAS_FBGEMM else [])
def test_packed_weights_give_a_token_the_same_bits_in_every_batch(inter: int) -> None:
    experts = make_experts("mxfp4", num_experts=8, hidden=96, inter=inter)
    config, x, topk = make_config(experts), inputs(150, 96), random_topk(150, 8)
    whole = run(experts, config, x, topk)
    for start, length in ((0, 1), (7, 1), (3, 2), (0, 8), (40, 17), (10, 140)):
        rows = slice(start, start + length)
        part = run(experts, config, x[rows], StandardTopK(topk.weights[rows], topk.ids[rows]))
        assert torch.equal(part, whole[rows])


@rows(
    "format_name, tp_size, ep_size, num_empty",
    ("mxfp4", 8, 2, 6),
    ("mxfp4", 1, 4, 0),
    ("mxfp4", 2, 2, 0),
    ("bf16", 4, 1, 1),
)
@both_ways
def test_shards_of_288_sum_to_the_whole(
    monkeypatch: pytest.MonkeyPatch, format_name: str, fits: bool, tp_size: int, ep_size: int, num_empty: int
) -> None:
    """Of 9 blocks of 32 a rank has at most ceil(9 / tp_size)."""
    set_memory(monkeypatch, fits)
    experts = make_experts(format_name, hidden=96, inter=288)
    x, topk, total, empty_ranks = inputs(5, 96), random_topk(5, 4), torch.zeros(5, 96), 0
    for number in range(tp_size * ep_size):
        topology = Topology(tp_size=tp_size, tp_rank=number % tp_size, ep_size=ep_size, ep_rank=number // tp_size)
        own = shard(experts, tp=(tp_size, topology.tp_rank), ep=(ep_size, topology.ep_rank))
        empty_ranks += own.intermediate_size == 0
        total += run(own, make_config(own, num_experts=4, place=topology), x, topk)
    assert empty_ranks == num_empty
    assert relative_error(total, reference_moe(x, topk, experts, GPT_OSS)) < 1e-5


def test_routing_inside_is_materialised_and_the_scaling_factor_is_in_the_weights_alone() -> None:
    experts = make_experts("fp8_block")
    x, logits = inputs(6), inputs(6, 4, seed=9)
    for normalize in (True, False):
        outputs = []
        for factor in (1.0, 2.5):
            routing = RoutingConfig(
                method=RoutingMethod.SIGMOID_GROUPED, num_experts=4, top_k=2, normalize=normalize,
                routed_scaling_factor=factor,
            )  # fmt: skip
            config = make_config(experts, routing=routing)
            outputs.append(run(experts, config, x, route(logits, routing)))
            assert torch.equal(run(experts, config, x, BypassedTopK(logits, routing)), outputs[-1])
        assert relative_error(outputs[1], 2.5 * outputs[0]) < 1e-6


def test_supports_every_device_and_names_what_it_refuses() -> None:
    backend, config = TorchBackend(), make_config(make_experts("bf16"))
    for arch in ("cpu", "sm90", "gfx942"):
        for format_name in FORMATS:
            assert backend.supports(Device(arch=arch), format_name, MoeA2ABackend.NONE, config) is None
    assert "int3 is not supported" in str(backend.supports(Device(arch="cpu"), "int3", MoeA2ABackend.NONE, config))
    assert "mori is not supported" in str(backend.supports(Device(arch="cpu"), "bf16", MoeA2ABackend.MORI, config))
