"""Experts, runners and low-latency slots shared by the tests of both CuTe-DSL layouts."""

import functools

import torch

from moe import Activation, MoeA2ABackend, MoeBackend, MoeRunner, MoeRunnerConfig, RankPlace, Topology
from moe.backends.flashinfer.cutedsl import FlashinferCutedslBackend
from moe.config import DispatchFormat
from moe.formats import ExpertWeights
from moe.types import DeepepLlDispatchOutput, RowsCombineInput
from tests.emulators.cutedsl import CutedslEmulator
from tests.moe.backends import hostile
from tests.moe.configs import ALONE

BACKEND = FlashinferCutedslBackend()
DEEPEP = MoeA2ABackend.DEEPEP
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


def low_latency_slots(own: range) -> tuple[torch.Tensor, torch.Tensor, list[list[tuple[int, int]]]]:
    """(slots [E, M, H] with NaN beyond the mask, masked_m, per expert the (token, k) of its rows)."""
    slots = torch.full((len(own), M, H), float("nan"), dtype=torch.bfloat16)
    origin = [[(int(t), int(k)) for t, k in torch.nonzero(TOPK.ids == expert)] for expert in own]
    for local, pairs in enumerate(origin):
        for row, (token, _) in enumerate(pairs):
            slots[local, row] = X[token]
    return slots, torch.tensor([len(pairs) for pairs in origin], dtype=torch.int32), origin


def dispatch_ll(
    slots: torch.Tensor, masked_m: torch.Tensor, scale: torch.Tensor | None = None
) -> DeepepLlDispatchOutput:
    return DeepepLlDispatchOutput(slots, scale, TOPK.ids.long(), TOPK.weights, masked_m, 4)


def sum_of_v1(emulator: CutedslEmulator, ep_size: int) -> torch.Tensor:
    """fp32 [T, H] of all ranks: as the transport does, times the sender's weights, without rows past the mask."""
    experts, total = make_experts(), torch.zeros(T, H)
    for rank in range(ep_size):
        topology = Topology(ep_size=ep_size, ep_rank=rank, a2a=DEEPEP)
        part = hostile.with_layer_scales(hostile.shard(experts, ep=(ep_size, rank)), experts)
        config = config_for(part, topology)
        slots, masked_m, origin = low_latency_slots(topology.expert_range(E))
        result = v1_runner(config).run(dispatch_ll(slots, masked_m), BACKEND.prepare(part, config, topology))
        assert isinstance(result, RowsCombineInput)
        assert not result.is_partial
        assert torch.equal(result.topk_ids, TOPK.ids.long())
        for local, pairs in enumerate(origin):
            for row, (token, k) in enumerate(pairs):
                total[token] += emulator.exact[local, row] * result.topk_weights[token, k]
    return total


@functools.cache
def expected_v1() -> torch.Tensor:
    return hostile.reference(X, TOPK, hostile.layer_wide(make_experts(), w2=False), Activation())
