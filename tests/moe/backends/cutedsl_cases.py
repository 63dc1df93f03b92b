"""Experts, runners and low-latency slots shared by the tests of both CuTe-DSL layouts."""

import functools

import torch

from moe import (
    Activation,
    MoeA2ABackend,
    MoeBackend,
    MoeRunner,
    MoeRunnerConfig,
    RankPlace,
    StandardDispatchOutput,
    StandardTopK,
    Topology,
)
from moe.backends.flashinfer.cutedsl import FlashinferCutedslBackend
from moe.config import DispatchFormat
from moe.formats import ExpertWeights
from moe.types import DeepepLlDispatchOutput
from tests.moe.backends import hostile
from tests.moe.configs import ALONE

BACKEND = FlashinferCutedslBackend()
NONE, DEEPEP, FLASHINFER = MoeA2ABackend.NONE, MoeA2ABackend.DEEPEP, MoeA2ABackend.FLASHINFER
E, H, I, K, T, M = 8, 256, 192, 3, 23, 128
TOLERANCE = 1e-3  # activations are quantized the same way
X, TOPK = hostile.tokens(T, H, size=3.0), hostile.routing(T, E, K)
LL_ONLY = (DispatchFormat.DEEPEP_LL,)


@functools.cache
def make_experts(**options: bool) -> ExpertWeights:
    return hostile.quantized_experts("nvfp4", E, H, I, x=X, **options)


def config_for(experts: ExpertWeights, place: RankPlace = ALONE) -> MoeRunnerConfig:
    return hostile.make_config(E, H, experts.intermediate_size, K, place=place)


def v1_runner(config: MoeRunnerConfig) -> MoeRunner:
    return MoeRunner(MoeBackend.FLASHINFER_CUTEDSL, DEEPEP, config, dispatch_formats=LL_ONLY)


def run_v2(experts: ExpertWeights, topology: Topology, topk: StandardTopK = TOPK) -> torch.Tensor:
    config = config_for(experts, topology)
    runner = MoeRunner(MoeBackend.FLASHINFER_CUTEDSL, NONE, config)
    result = runner.run(StandardDispatchOutput(X, topk), BACKEND.prepare(experts, config, topology))
    assert result.is_partial == topology.is_partial
    return result.hidden_states


def low_latency_slots(topk: StandardTopK, own: range) -> tuple[torch.Tensor, torch.Tensor, list[list[tuple[int, int]]]]:
    """(slots [E, M, H] with NaN beyond the mask, masked_m, per expert the (token, k) of its rows)."""
    slots = torch.full((len(own), M, H), float("nan"), dtype=torch.bfloat16)
    origin: list[list[tuple[int, int]]] = []
    for local, expert in enumerate(own):
        pairs = [(int(t), int(k)) for t, k in torch.nonzero(topk.ids == expert)]
        origin.append(pairs)
        for row, (token, _) in enumerate(pairs):
            slots[local, row] = X[token]
    return slots, torch.tensor([len(pairs) for pairs in origin], dtype=torch.int32), origin


def combine(out: torch.Tensor, topk: StandardTopK, origin: list[list[tuple[int, int]]]) -> torch.Tensor:
    """What the transport does: multiply by the sender's weights and add; never read past the mask."""
    total = torch.zeros(T, H)
    for local, pairs in enumerate(origin):
        for row, (token, k) in enumerate(pairs):
            total[token] += out[local, row].float() * topk.weights[token, k]
    return total


def dispatch_ll(
    slots: torch.Tensor, masked_m: torch.Tensor, scale: torch.Tensor | None = None
) -> DeepepLlDispatchOutput:
    return DeepepLlDispatchOutput(slots, scale, TOPK.ids.long(), TOPK.weights, masked_m, 4)


@functools.cache
def expected_v1(experts: ExpertWeights) -> torch.Tensor:
    return hostile.reference(X, TOPK, hostile.layer_wide(experts, w2=False), Activation())


def expected_v2(experts: ExpertWeights) -> torch.Tensor:
    return hostile.reference(X, TOPK, hostile.layer_wide(experts), Activation())
