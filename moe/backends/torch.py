"""Experts in plain torch on any device and in every format: the CPU default, and the path everything falls back to.

Weights are dequantized once at load when they fit the memory budget, else one active expert at a time.
Shape letters: T tokens, K top-k, S slots (T*K), E local experts, H hidden, I intermediate.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from moe.activations import gated_activation
from moe.backends.base import Backend, Device
from moe.config import DispatchFormat, MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.formats import ExpertWeights
from moe.registry import register_backend, register_post_permute, register_pre_permute, register_runner_core
from moe.topology import Topology
from moe.types import RunState, StandardCombineInput, StandardDispatchOutput


@dataclass(frozen=True, slots=True)
class TorchMoeQuantInfo:
    """Processed weights. Dense ones are None when experts are dequantized as they are needed."""

    experts: ExpertWeights
    w13_EFH: torch.Tensor | None
    w2_EHI: torch.Tensor | None
    topology: Topology
    expert_ids: range
    overlap_args: Any = field(default=None)


@dataclass(frozen=True, slots=True)
class TorchCoreInput:
    """Tokens [T, H], local expert ids [T, K] with -1 for "not here", fp32 weights [T, K]."""

    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor


@register_backend(MoeBackend.TORCH)
class TorchBackend(Backend):
    """Runs everywhere; slow on GPUs, honest everywhere."""

    hardware = "any CPU or GPU"
    formats = ("bf16", "fp8_block", "fp8_tensor", "mxfp4", "nvfp4")

    def supports(self, device: Device, format_name: str, a2a: MoeA2ABackend, config: MoeRunnerConfig) -> str | None:
        """Any device and format, without a transport."""
        del device
        if format_name not in self.formats:
            return f"format {format_name} is unknown; known: {', '.join(self.formats)}"
        if a2a is not MoeA2ABackend.NONE:
            return f"transport {a2a} is not supported; use --moe-a2a-backend none"
        return self.refuses(config)

    def prepare(self, experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> TorchMoeQuantInfo:
        """Dequantize to `config.dtype` if the dense weights fit in half of the free memory."""
        num_dense_bytes = 3 * experts.num_experts * experts.hidden_size * experts.intermediate_size
        fits = num_dense_bytes * config.dtype.itemsize <= _free_bytes(topology.device) // 2
        return TorchMoeQuantInfo(
            experts=experts,
            w13_EFH=experts.w13.dequantize(config.dtype) if fits else None,
            w2_EHI=experts.w2.dequantize(config.dtype) if fits else None,
            topology=topology,
            expert_ids=topology.expert_range(config.num_experts),
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        available = next(line for line in meminfo if line.startswith("MemAvailable:"))
    return int(available.split()[1]) * 1024


@register_runner_core(MoeBackend.TORCH)
class TorchRunnerCore:
    """Loops over the active experts; each computes its own rows."""

    def __init__(self, config: MoeRunnerConfig) -> None:
        self.config = config

    def run(self, core_input: TorchCoreInput, quant_info: TorchMoeQuantInfo, state: RunState) -> torch.Tensor:
        """Weighted sum over each token's local experts, [T, H]; a slot with id -1 adds exactly zero."""
        del state
        x_TH = core_input.x_TH.to(self.config.dtype)
        out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
        for expert in torch.unique(core_input.ids_TK).tolist():
            if expert < 0:
                continue
            rows, slots = torch.where(core_input.ids_TK == expert)
            y_RH = self._expert(x_TH[rows], expert, quant_info)
            out_TH.index_add_(0, rows, y_RH.float() * core_input.weights_TK[rows, slots, None])
        return out_TH.to(self.config.dtype)

    def _expert(self, x_RH: torch.Tensor, expert: int, quant_info: TorchMoeQuantInfo) -> torch.Tensor:
        experts = quant_info.experts
        w13_FH, w2_HI = _dense(quant_info, expert, x_RH.dtype)
        h_RF = x_RH @ w13_FH.T
        if experts.b13 is not None:
            h_RF = h_RF + experts.b13[expert]
        gate_RI, up_RI = h_RF.chunk(2, dim=-1)
        y_RH = gated_activation(gate_RI, up_RI, self.config.activation) @ w2_HI.T
        if experts.b2 is not None and quant_info.topology.tp_rank == 0:  # one rank of the sum carries the bias
            y_RH = y_RH + experts.b2[expert]
        return y_RH


def _dense(info: TorchMoeQuantInfo, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if info.w13_EFH is not None and info.w2_EHI is not None:
        return info.w13_EFH[expert], info.w2_EHI[expert]
    return info.experts.w13.select(expert).dequantize(dtype), info.experts.w2.select(expert).dequantize(dtype)


@register_pre_permute(DispatchFormat.STANDARD, MoeBackend.TORCH)
def standard_to_torch(
    dispatched: StandardDispatchOutput, quant_info: TorchMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> TorchCoreInput:
    """Global expert ids to local ones; ids of other ranks become -1."""
    del config, state
    topk = dispatched.topk_output.to_standard()
    ids_TK = topk.ids
    if quant_info.topology.ep_size > 1:
        first, last = quant_info.expert_ids[0], quant_info.expert_ids[-1]
        is_local = (ids_TK >= first) & (ids_TK <= last)
        ids_TK = torch.where(is_local, ids_TK - first, -1)
    return TorchCoreInput(dispatched.hidden_states, ids_TK, topk.weights)


@register_post_permute(MoeBackend.TORCH, DispatchFormat.STANDARD)
def torch_to_standard(
    out_TH: torch.Tensor,
    dispatched: StandardDispatchOutput,
    quant_info: TorchMoeQuantInfo,
    config: MoeRunnerConfig,
    state: RunState,
) -> StandardCombineInput:
    """Already one row per token; partial when other ranks hold the rest of the sum."""
    del dispatched, config, state
    return StandardCombineInput(out_TH, is_partial=quant_info.topology.is_partial)
