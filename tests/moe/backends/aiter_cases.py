"""Experts, twin and runs that the aiter tests share."""

import functools
from typing import Any

import torch

from moe import Activation, MoeA2ABackend, MoeBackend, MoeRunner, StandardDispatchOutput, Topology
from moe.backends.aiter.backend import AiterBackend
from moe.check.reference import reference_moe
from moe.config import DispatchDtype, DispatchFormat
from moe.dispatch.deepep_settings import DeepepMode
from moe.dispatch.mori import MoriBuffer, MoriDispatcher, MoriSettings
from moe.formats import ExpertWeights
from tests.emulators.ranks import Rank
from tests.moe.backends import hostile
from tests.moe.dispatch import several_ranks

E, K, H, I = 8, 3, 256, 256
LL_H = 2048
PLAIN = Activation()
BACKEND = AiterBackend()
TOLERANCE = {"bf16": 1e-5, "fp8_block": 1e-3, "fp8_tensor": 1e-3, "mxfp4": 1e-3}


@functools.cache
def experts_of(name: str, hidden: int = H, inter: int = I) -> ExpertWeights:
    return hostile.plain_experts(name, E, hidden, inter)


def twin(x: torch.Tensor, topk: Any, experts: ExpertWeights) -> torch.Tensor:
    quantize = BACKEND.formats[experts.format_name].activation_quant
    return reference_moe(x, topk, experts, PLAIN, quantize_input=quantize)


def run_alone(name: str, topology: Topology | None = None, num_tokens: int = 30, hidden: int = H) -> tuple[Any, ...]:
    topology = topology or Topology()
    experts, x, topk = experts_of(name, hidden), hostile.tokens(num_tokens, hidden), hostile.routing(num_tokens, E, K)
    local = hostile.shard(experts, ep=(topology.ep_size, topology.ep_rank), block=256)
    config = several_ranks.layer_config(experts, torch.bfloat16, place=topology)
    info = BACKEND.prepare(local, config, topology)
    result = MoeRunner(MoeBackend.AITER, MoeA2ABackend.NONE, config).run(StandardDispatchOutput(x, topk), info)
    assert result.is_partial == topology.is_partial
    return result.hidden_states, x, topk, experts


def deepep_for(mode: DeepepMode, hidden: int) -> Any:
    return lambda rank, config: several_ranks.deepep(rank, mode, hidden)


def mori_for(dispatch_dtype: DispatchDtype, fp8_dtype: torch.dtype = torch.float8_e4m3fn, **settings: Any) -> Any:
    def build(rank: Rank, config: Any) -> MoriDispatcher:
        choice = MoriSettings(max_dispatch_tokens=8, **settings)
        shape = several_ranks.shape_of(rank, H)
        return MoriDispatcher(MoriBuffer(rank, choice, shape, dispatch_dtype, fp8_dtype=fp8_dtype))

    return build


def behind(a2a: MoeA2ABackend, layout: DispatchFormat, build: Any, name: str, num_tokens: list[int]) -> float:
    experts = experts_of(name, hidden := LL_H if layout is DispatchFormat.DEEPEP_LL else H)
    inputs = several_ranks.rank_inputs(num_tokens, hidden, torch.bfloat16)
    outputs = several_ranks.run_layer(
        experts, inputs, backend=MoeBackend.AITER, a2a=a2a, formats=(layout,), dispatcher_for=build,
        dtype=torch.bfloat16,
    )  # fmt: skip
    return several_ranks.worst_error(outputs, inputs, lambda x, topk: twin(x, topk, experts))
