"""bf16 experts in plain torch, one expert at a time: the example of docs/architecture.md."""

from dataclasses import dataclass
from types import MappingProxyType

import torch

from moe.backend import Backend, FormatSupport, matrices, refuse_overlap
from moe.config import DispatchFormat, MoeBackend, MoeRunnerConfig
from moe.formats import Bf16Weight, ExpertWeights
from moe.layouts.expert_slots import local_ids
from moe.registry import register_backend, register_pre_permute, register_runner_core
from moe.topology import Topology
from moe.types import RunState, StandardDispatchOutput

NAME = MoeBackend.EXAMPLE


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleMoeQuantInfo:
    """What `prepare` makes of one layer: here the matrices, transposed."""

    w13: torch.Tensor  # bf16 [E, H, 2I], columns [gate, up]
    w2: torch.Tensor  # bf16 [E, I, H]
    topology: Topology


@dataclass(frozen=True, slots=True)
class ExampleInput:
    """What the core takes: tokens [T, H], local ids [T, K] with -1 for other ranks' experts, fp32 weights [T, K]."""

    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor


@register_backend
class ExampleBackend(Backend[ExampleMoeQuantInfo]):
    """Everything that is true of this backend alone."""

    name = NAME
    auto_order = 100  # behind all others
    hardware = "any CPU or GPU"
    formats = MappingProxyType({"bf16": FormatSupport(multiples=(8, 8))})

    def lay_out(self, experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> ExampleMoeQuantInfo:
        """Format, biases, sizes, activation, dtype, package and device have been checked."""
        w13, w2 = matrices(experts, Bf16Weight, topology.device)
        return ExampleMoeQuantInfo(w13=w13.data.mT.contiguous(), w2=w2.data.mT.contiguous(), topology=topology)


@register_pre_permute(DispatchFormat.STANDARD, NAME)
def standard_to_example(
    dispatched: StandardDispatchOutput, quant_info: ExampleMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> ExampleInput:
    """From the layout of the transport `none` to the core's."""
    topk = dispatched.topk_output.to_standard()
    own = quant_info.topology.expert_range(config.num_experts)
    return ExampleInput(dispatched.hidden_states, local_ids(topk.ids, own), topk.weights)


@register_runner_core(NAME)
class ExampleRunnerCore:
    """The kernels."""

    def __init__(self, config: MoeRunnerConfig) -> None:
        self.config = config

    def run(self, core_input: ExampleInput, quant_info: ExampleMoeQuantInfo, state: RunState) -> torch.Tensor:
        """Weighted sum over each token's local experts [T, H]; the dispatch record wraps it for the transport."""
        refuse_overlap(state, NAME)
        x_TH, ids_TK = core_input.x_TH, core_input.ids_TK
        out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
        for expert in range(len(quant_info.w13)):
            rows, slots = torch.where(ids_TK == expert)
            gate_RI, up_RI = (x_TH[rows] @ quant_info.w13[expert]).float().chunk(2, dim=-1)
            a_RI = (torch.nn.functional.silu(gate_RI) * up_RI).to(x_TH.dtype)
            y_RH = (a_RI @ quant_info.w2[expert]).float()
            out_TH.index_add_(0, rows, y_RH * core_input.weights_TK[rows, slots, None])
        return out_TH.to(self.config.dtype)
