"""Our own Triton kernels as a backend: bf16, FP8 block, MXFP4 and NVFP4 experts with bf16 activations on CUDA GPUs.

One processed layout serves every token count; `triton_plans.py` chooses how it is launched. Triton is imported late.
Shape letters: T tokens, K top-k, H hidden.
"""

import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from moe.backends.base import Backend, Device
from moe.backends.triton_plans import LayerShape, PlanTable, device_name, plans_for
from moe.config import MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.errors import UnsupportedPathError
from moe.formats import ExpertWeights
from moe.kernels.layout import pack_matrix
from moe.registry import register_backend, register_fused_func
from moe.topology import Topology
from moe.types import RunState, StandardCombineInput, StandardDispatchOutput

if TYPE_CHECKING:
    from moe.kernels.launch import Layer

_OLDEST_ARCH = 80  # the first with bf16 tensor cores


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonMoeQuantInfo:
    """Processed weights of one layer and the plans that read them."""

    layer: "Layer"
    plans: PlanTable
    topology: Topology
    overlap_args: Any = field(default=None)


@register_backend(MoeBackend.TRITON)
class TritonBackend(Backend):
    """Weights in any of four formats times bf16 activations, accumulated in fp32, summed without atomics."""

    hardware = "CUDA GPUs from sm80"
    formats = ("bf16", "fp8_block", "mxfp4", "nvfp4")

    def supports(self, device: Device, format_name: str, a2a: MoeA2ABackend, config: MoeRunnerConfig) -> str | None:
        """bf16 layers on CUDA GPUs from sm80, without a transport, where Triton is installed."""
        if not device.is_cuda:
            return f"device {device.arch} is not supported; it runs on {self.hardware}"
        if int(device.arch.removeprefix("sm").rstrip("af")) < _OLDEST_ARCH:
            return f"{device.arch} has no bf16 tensor cores; it runs on {self.hardware}"
        if format_name not in self.formats:
            return f"format {format_name} is not supported; it takes {', '.join(self.formats)}"
        if a2a is not MoeA2ABackend.NONE:
            return f"transport {a2a} is not supported; use --moe-a2a-backend none"
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        return self.refuses(config)

    def refuses(self, config: MoeRunnerConfig) -> str | None:
        """Also any activation dtype but bf16."""
        if config.dtype is not torch.bfloat16:
            return f"dtype {config.dtype} is not supported: the kernels multiply bf16 activations"
        return Backend.refuses(self, config)

    def prepare(self, experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> TritonMoeQuantInfo:
        """Pack on `topology.device` and look the plans up.

        Raises:
            WeightFormatError: a number format or size without kernel.
            UnsupportedPathError: Triton is not installed.
        """
        if importlib.util.find_spec("triton") is None:
            raise UnsupportedPathError("--moe-backend triton needs the package triton; install the extra 'gpu'")
        from moe.kernels.launch import Layer

        b13, b2 = (None if bias is None else bias.to(topology.device) for bias in (experts.b13, experts.b2))
        local = topology.expert_range(config.num_experts)
        layer = Layer(
            w13=pack_matrix(experts.w13.to(topology.device), b13, is_gated=True),
            w2=pack_matrix(experts.w2.to(topology.device), b2, is_gated=False),
            first_expert=local.start,
            num_experts=len(local),
            top_k=config.top_k,
            activation=config.activation,
            adds_bias_2=topology.tp_rank == 0,  # one rank of the sum carries the bias
        )
        shape = LayerShape(
            gpu=device_name(topology.device),
            format_name=experts.format_name,
            num_experts=config.num_experts,
            num_local_experts=len(local),
            top_k=config.top_k,
            hidden_size=experts.hidden_size,
            intermediate_size=experts.intermediate_size,
        )
        return TritonMoeQuantInfo(layer=layer, plans=plans_for(shape), topology=topology)


@register_fused_func(MoeA2ABackend.NONE, MoeBackend.TRITON)
def run_standard(
    dispatched: StandardDispatchOutput, quant_info: TritonMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> StandardCombineInput:
    """Standard layout in and out; partial when other ranks hold the rest of the sum."""
    del state
    from moe.kernels.launch import run_layer

    topk = dispatched.topk_output.to_standard()
    x_TH = dispatched.hidden_states.to(config.dtype)
    if x_TH.stride(-1) != 1:
        x_TH = x_TH.contiguous()
    topology = quant_info.topology
    out_TH = topology.alloc_output((x_TH.shape[0], x_TH.shape[1]), config.dtype)
    if quant_info.layer.intermediate_size == 0:  # a rank may own no block of the intermediate axis
        return StandardCombineInput(out_TH.zero_(), is_partial=topology.is_partial)
    ids_TK, weights_TK = topk.ids.to(torch.int32).contiguous(), topk.weights.float().contiguous()
    run_layer(x_TH, ids_TK, weights_TK, quant_info.layer, quant_info.plans.pick(x_TH.shape[0]), out_TH)
    return StandardCombineInput(out_TH, is_partial=topology.is_partial)
