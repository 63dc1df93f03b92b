"""FlashInfer's `cutlass_fused_moe`: bf16, FP8 per tensor (SM90+), FP8 128x128 blocks (SM90), NVFP4 (SM100).

One quant info per format; all hold w13 as [up; gate]. FP8 blocks compile a kernel per shape at run time (needs nvcc).
Shape letters: T tokens, E local experts, I intermediate, H hidden.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from moe.backend import FormatSupport, Tactic, TacticTable, matrices, refuse_overlap
from moe.backends.flashinfer import common
from moe.backends.flashinfer.profiles import NO_PROFILES, Profiles, profile_lists, profiles_of, proposals
from moe.config import MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.errors import MoeConfigError
from moe.formats import Bf16Weight, ExpertWeights, Fp8BlockWeight, Fp8TensorWeight, Nvfp4Weight
from moe.formats.fp8 import to_e4m3
from moe.layouts.rows import next_power_of_two, swizzle_128x4, up_gate
from moe.layouts.static_scales import layer_input_scales, one_scale_fp8, one_scale_nvfp4
from moe.registry import register_backend, register_fused_func
from moe.topology import Topology
from moe.types import DispatchOutput, RunState, StandardCombineInput

NAME = MoeBackend.FLASHINFER_CUTLASS
SM90, SM100 = ("sm90",), ("sm100", "sm103")
SMALLEST_BLOCK_SCALE = 1e-10  # smaller scales gave NaN on SM90


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashinferCutlassBf16QuantInfo:
    """bf16 weights; biases [E, 2I] as [up; gate] and [E, H]."""

    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None
    b2: torch.Tensor | None
    swiglu_alpha: torch.Tensor | None
    swiglu_beta: torch.Tensor | None
    swiglu_limit: torch.Tensor | None
    topology: Topology
    profiles: Profiles = NO_PROFILES


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashinferCutlassFp8BlockQuantInfo:
    """e4m3 weights and fp32 scales [E, 2I/128, H/128], [E, H/128, I/128]; the kernel quantizes activations.

    It has no profiles: in this mode the library ignores profile numbers and sets the tile itself.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    topology: Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashinferCutlassFp8TensorQuantInfo:
    """e4m3 weights with one scale per expert; one activation scale per GEMM for the whole layer."""

    w13: torch.Tensor
    w2: torch.Tensor
    input_scale: torch.Tensor  # fp32 scalar
    w13_dequant: torch.Tensor  # fp32 [E]: weight scale times input scale
    mid_quant: torch.Tensor  # fp32 scalar: reciprocal of the second GEMM's input scale
    w2_dequant: torch.Tensor  # fp32 [E]
    topology: Topology
    profiles: Profiles = NO_PROFILES


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashinferCutlassNvfp4QuantInfo:
    """Packed weights seen as int64, swizzled block scales seen as int32, scalar activation factors, alphas [E]."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    input_quant: torch.Tensor  # fp32 scalar: reciprocal input scale
    w13_alpha: torch.Tensor  # fp32 [E]
    mid_quant: torch.Tensor
    w2_alpha: torch.Tensor
    topology: Topology
    profiles: Profiles = NO_PROFILES


QuantInfo = (
    FlashinferCutlassBf16QuantInfo
    | FlashinferCutlassFp8BlockQuantInfo
    | FlashinferCutlassFp8TensorQuantInfo
    | FlashinferCutlassNvfp4QuantInfo
)


@register_backend
class FlashinferCutlassBackend(common.FlashinferBackend[QuantInfo]):
    """One fused kernel from tokens and ids to the weighted sum."""

    name = NAME
    auto_order = 50
    hardware = "SM90+ (FP8 blocks SM90 only, NVFP4 SM100 only)"
    formats = MappingProxyType({
        "bf16": FormatSupport(archs=SM90 + SM100, multiples=(8, 8), takes_biases=True, activations=None),
        "fp8_block": replace(common.FP8_BLOCK, archs=SM90, multiples=(128, 128)),
        "fp8_tensor": replace(common.FP8_TENSOR, archs=SM90 + SM100, multiples=(16, 16)),
        "nvfp4": replace(common.NVFP4, archs=SM100, multiples=(128, 64)),
    })  # fmt: skip
    tunable_with = (MoeA2ABackend.NONE,)
    is_capturable = True

    def lay_out(self, experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> QuantInfo:
        """Swap the halves of w13 and of its scales, and put scales in the kernel's form.

        Raises:
            WeightFormatError: missing input scales.
        """
        if experts.format_name == "bf16":
            return _prepare_bf16(experts, config, topology)
        if experts.format_name == "fp8_block":
            return _prepare_fp8_block(experts, topology)
        if experts.format_name == "fp8_tensor":
            return _prepare_fp8_tensor(experts, topology)
        return _prepare_nvfp4(experts, topology)

    def tactics(
        self, quant_info: QuantInfo, config: MoeRunnerConfig, num_tokens: int, measured: Mapping[Tactic, float]
    ) -> Sequence[Tactic]:
        """Profile numbers; none for FP8 blocks."""
        del num_tokens
        if isinstance(quant_info, FlashinferCutlassFp8BlockQuantInfo):
            return ()
        is_quantized = isinstance(quant_info, FlashinferCutlassFp8TensorQuantInfo)
        x_dtype = torch.float8_e4m3fn if is_quantized else config.dtype
        return proposals(profile_lists(quant_info, x_dtype, config.top_k), measured)

    def with_choice(self, quant_info: QuantInfo, choice: TacticTable) -> QuantInfo:
        """The same weights with the chosen profiles."""
        if isinstance(quant_info, FlashinferCutlassFp8BlockQuantInfo):
            return super().with_choice(quant_info, choice)
        return replace(quant_info, profiles=profiles_of(choice))


def _prepare_bf16(
    experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology
) -> FlashinferCutlassBf16QuantInfo:
    w13, w2 = matrices(experts, Bf16Weight, topology.device)
    alpha, beta, limit = common.swiglu_tensors(config.activation, experts.num_experts, topology.device)

    def bias(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device=topology.device, dtype=torch.bfloat16)

    b13 = bias(experts.b13)
    return FlashinferCutlassBf16QuantInfo(
        w13=up_gate(w13.data.to(torch.bfloat16)),
        w2=w2.data.to(torch.bfloat16).contiguous(),
        b13=None if b13 is None else up_gate(b13),
        b2=bias(experts.b2),
        swiglu_alpha=alpha, swiglu_beta=beta, swiglu_limit=limit,
        topology=topology,
    )  # fmt: skip


def _prepare_fp8_block(experts: ExpertWeights, topology: Topology) -> FlashinferCutlassFp8BlockQuantInfo:
    w13, w2 = matrices(experts, Fp8BlockWeight, topology.device)
    return FlashinferCutlassFp8BlockQuantInfo(
        w13=up_gate(w13.data),
        w13_scale=up_gate(w13.scale_inv).clamp_min(SMALLEST_BLOCK_SCALE),
        w2=w2.data.contiguous(),
        w2_scale=w2.scale_inv.contiguous().clamp_min(SMALLEST_BLOCK_SCALE),
        topology=topology,
    )


def _prepare_fp8_tensor(experts: ExpertWeights, topology: Topology) -> FlashinferCutlassFp8TensorQuantInfo:
    w13, w2 = matrices(experts, Fp8TensorWeight, topology.device)
    input_scale, mid_scale = layer_input_scales(experts, topology)
    data13, scale13_E = one_scale_fp8(w13)
    return FlashinferCutlassFp8TensorQuantInfo(
        w13=up_gate(data13),
        w2=w2.data.contiguous(),
        input_scale=input_scale,
        w13_dequant=scale13_E * input_scale,
        mid_quant=mid_scale.reciprocal(),
        w2_dequant=w2.scale * mid_scale,
        topology=topology,
    )


def _prepare_nvfp4(experts: ExpertWeights, topology: Topology) -> FlashinferCutlassNvfp4QuantInfo:
    w13, w2 = matrices(experts, Nvfp4Weight, topology.device)
    input_scale, mid_scale = layer_input_scales(experts, topology)
    scales13, scale13_E = one_scale_nvfp4(w13)
    return FlashinferCutlassNvfp4QuantInfo(
        w13=up_gate(w13.codes).view(torch.int64),
        w13_scale=swizzle_128x4(up_gate(scales13)).view(torch.int32),
        w2=w2.codes.contiguous().view(torch.int64),
        w2_scale=swizzle_128x4(w2.scales).view(torch.int32),
        input_quant=input_scale.reciprocal(),
        w13_alpha=scale13_E * input_scale,
        mid_quant=mid_scale.reciprocal(),
        w2_alpha=w2.scale_2 * mid_scale,
        topology=topology,
    )


@functools.singledispatch
def _kernel_arguments(info: object, x_TH: torch.Tensor) -> dict[str, object]:
    """The arguments that differ by format: input tensor, scales and flags."""
    del x_TH
    raise MoeConfigError(f"{NAME} cannot run a {type(info).__name__}")


@_kernel_arguments.register
def _(info: FlashinferCutlassBf16QuantInfo, x_TH: torch.Tensor) -> dict[str, object]:
    return {
        "input": x_TH, "quant_scales": [], "fc1_expert_biases": info.b13, "fc2_expert_biases": info.b2,
        "swiglu_alpha": info.swiglu_alpha, "swiglu_beta": info.swiglu_beta, "swiglu_limit": info.swiglu_limit,
    }  # fmt: skip


@_kernel_arguments.register
def _(info: FlashinferCutlassFp8BlockQuantInfo, x_TH: torch.Tensor) -> dict[str, object]:
    return {"input": x_TH, "quant_scales": [info.w13_scale, info.w2_scale], "use_deepseek_fp8_block_scale": True}


@_kernel_arguments.register
def _(info: FlashinferCutlassFp8TensorQuantInfo, x_TH: torch.Tensor) -> dict[str, object]:
    scales = [info.w13_dequant, info.mid_quant, info.w2_dequant, info.input_scale]
    return {"input": to_e4m3(x_TH.float() / info.input_scale), "quant_scales": scales}


@_kernel_arguments.register
def _(info: FlashinferCutlassNvfp4QuantInfo, x_TH: torch.Tensor) -> dict[str, object]:
    first = [info.input_quant, info.w13_scale, info.w13_alpha]
    return {"input": x_TH, "quant_scales": [*first, info.mid_quant, info.w2_scale, info.w2_alpha]}


@register_fused_func(MoeA2ABackend.NONE, NAME)
def run_flashinfer_cutlass(
    dispatched: DispatchOutput, quant_info: QuantInfo, config: MoeRunnerConfig, state: RunState
) -> StandardCombineInput:
    """Weighted sum over each token's local experts [T, H], bf16."""
    refuse_overlap(state, NAME)
    dispatched = common.standard_tokens(dispatched, NAME)
    arguments = _kernel_arguments(quant_info, dispatched.hidden_states.to(config.dtype))
    if not isinstance(quant_info, FlashinferCutlassFp8BlockQuantInfo):
        arguments |= quant_info.profiles.arguments(dispatched.hidden_states.shape[0])
    topk, topology = dispatched.topk_output.to_standard(), quant_info.topology
    out_TH = topology.alloc_output(tuple(dispatched.hidden_states.shape), config.dtype)
    kernel: Callable[..., object] = common.library("fused_moe").cutlass_fused_moe
    kernel(
        token_selected_experts=topk.ids,  # global ids; the kernel skips -1 and other ranks' experts
        token_final_scales=topk.weights,
        fc1_expert_weights=quant_info.w13,
        fc2_expert_weights=quant_info.w2,
        output_dtype=config.dtype,
        tp_size=topology.tp_size, tp_rank=topology.tp_rank,
        ep_size=topology.ep_size, ep_rank=topology.ep_rank,
        output=out_TH,
        tune_max_num_tokens=next_power_of_two(out_TH.shape[0]),
        **arguments,
    )  # fmt: skip
    return dispatched.result(out_TH, topology.is_partial)
