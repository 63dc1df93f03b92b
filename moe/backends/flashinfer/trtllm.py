"""FlashInfer's TRT-LLM kernels on SM100: FP8 blocks, FP8 per tensor, NVFP4. They route inside from the gate's logits.

Given ids and weights instead (as in the self-check), the pre-routed form of the same kernel runs on the same layout.
Shape letters: T tokens, E experts, I intermediate, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

import torch

from moe.backend import LibraryTuning, matrices, refuse_overlap
from moe.backends.flashinfer import common
from moe.backends.flashinfer.trtllm_layout import pack_topk, shuffled, shuffled_scales
from moe.config import MoeA2ABackend, MoeBackend, MoeRunnerConfig, RoutingConfig, RoutingMethod
from moe.errors import MoeConfigError, UnsupportedPathError
from moe.formats import ExpertWeights, Fp8BlockWeight, Fp8TensorWeight, Nvfp4Weight
from moe.formats.fp8 import E4M3, to_e4m3
from moe.formats.token_groups import quantize_token_groups
from moe.layouts.rows import next_power_of_two, up_gate
from moe.layouts.static_scales import layer_input_scales, one_scale_fp8, one_scale_nvfp4
from moe.registry import register_backend, register_fused_func
from moe.routing import BypassedTopK, TopKOutput
from moe.topology import Topology
from moe.types import DispatchOutput, RunState, StandardCombineInput

NAME = MoeBackend.FLASHINFER_TRTLLM
ARCHS = ("sm100", "sm103")
BF16_LOGITS = (0, 6, 8)  # before this release DeepSeek-V3 routing takes fp32 logits only
ROUTING_NAMES = {  # members of the library's enum; their numbers moved between releases
    RoutingMethod.SOFTMAX_AFTER_TOPK: "Renormalize",
    RoutingMethod.SIGMOID_GROUPED: "DeepSeekV3",
}
MAX_KEPT_GROUPS, MAX_GROUPED_TOP_K = 4, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashinferTrtllmFp8BlockQuantInfo:
    """e4m3 [E, 2I, H] as [up; gate] and [E, H, I], rows as they are; fp32 scales per 128 x 128 block."""

    kernel: ClassVar[str] = "trtllm_fp8_block_scale"
    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    logits_dtype: torch.dtype | None  # None: as they come
    topology: Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashinferTrtllmFp8TensorQuantInfo:
    """e4m3 weights, rows alternating up and gate and shuffled; fp32 [E] output scales of both GEMMs."""

    kernel: ClassVar[str] = "trtllm_fp8_per_tensor_scale"
    w13: torch.Tensor
    w2: torch.Tensor
    input_scale: torch.Tensor  # fp32 scalar
    output1_scale: torch.Tensor
    output1_gate_scale: torch.Tensor
    output2_scale: torch.Tensor
    logits_dtype: torch.dtype | None
    topology: Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashinferTrtllmNvfp4QuantInfo:
    """Packed weights, rows as in the per-tensor form, block scales swizzled too; fp32 [E] output scales."""

    kernel: ClassVar[str] = "trtllm_fp4_block_scale"
    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    input_quant: torch.Tensor  # fp32 [1]: reciprocal input scale
    output1_scale: torch.Tensor
    output1_gate_scale: torch.Tensor
    output2_scale: torch.Tensor
    logits_dtype: torch.dtype | None
    topology: Topology


QuantInfo = FlashinferTrtllmFp8BlockQuantInfo | FlashinferTrtllmFp8TensorQuantInfo | FlashinferTrtllmNvfp4QuantInfo


def forced_logits_dtype(format_name: str, routing: RoutingConfig | None, version: common.Version) -> torch.dtype | None:
    """The only dtype of router logits that a kernel takes; None if it takes both bf16 and fp32."""
    if format_name == "fp8_tensor":
        return torch.bfloat16
    is_deepseek = routing is not None and routing.method is RoutingMethod.SIGMOID_GROUPED
    return torch.float32 if is_deepseek and version < BF16_LOGITS else None


@register_backend
class FlashinferTrtllmBackend(common.FlashinferBackend[QuantInfo]):
    """Routing, both GEMMs and the weighted sum in one call."""

    name = NAME
    auto_order = 10
    hardware = "SM100/SM103 (Blackwell)"
    minimum_version = (0, 6, 0)
    formats = MappingProxyType({
        "fp8_block": replace(common.FP8_BLOCK, archs=ARCHS, multiples=(128, 128)),
        "fp8_tensor": replace(common.FP8_TENSOR, archs=ARCHS, multiples=(128, 128)),
        "nvfp4": replace(common.NVFP4, archs=ARCHS, multiples=(128, 128)),
    })  # fmt: skip
    tunable_with = (MoeA2ABackend.NONE,)
    routes_inside = True

    def unsupported_reason(self, config: MoeRunnerConfig) -> str | None:
        """Also refuses routing that the kernel computes differently."""
        return super().unsupported_reason(config) or _unsupported_routing(config.routing)

    def router_logits_dtype(self, format_name: str) -> torch.dtype:
        """bf16, unless the installed release takes fp32 only."""
        del format_name
        version = common.flashinfer_version()
        return torch.float32 if version is not None and version < BF16_LOGITS else torch.bfloat16

    def library_tuning(self, quant_info: QuantInfo) -> LibraryTuning | None:
        """FlashInfer chooses the tiles of both GEMMs."""
        del quant_info
        return common.tuning_context

    def lay_out(self, experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> QuantInfo:
        """Reorder rows and fold scales on `topology.device`.

        Raises:
            WeightFormatError: missing input scales.
        """
        version = common.flashinfer_version() or self.minimum_version
        logits_dtype = forced_logits_dtype(experts.format_name, config.routing, version)
        if experts.format_name == "fp8_tensor":
            return _prepare_fp8_tensor(experts, logits_dtype, topology)
        if experts.format_name == "nvfp4":
            return _prepare_nvfp4(experts, logits_dtype, topology)
        w13, w2 = matrices(experts, Fp8BlockWeight, topology.device)
        return FlashinferTrtllmFp8BlockQuantInfo(
            w13=up_gate(w13.data), w13_scale=up_gate(w13.scale_inv),
            w2=w2.data.contiguous(), w2_scale=w2.scale_inv.contiguous(),
            logits_dtype=logits_dtype, topology=topology,
        )  # fmt: skip


def _unsupported_routing(routing: RoutingConfig | None) -> str | None:
    if routing is None:
        return None
    if routing.method not in ROUTING_NAMES:
        return f"routing {routing.method} is not supported: the kernel routes by {', '.join(ROUTING_NAMES)}"
    if not routing.normalize:
        return "routing without normalized weights is not supported: the kernel normalizes"
    if routing.method is RoutingMethod.SOFTMAX_AFTER_TOPK:
        return None if routing.num_groups == 1 else "expert groups need routing sigmoid_grouped"
    num_kept = routing.num_kept_groups * routing.num_experts // routing.num_groups
    limits = {
        f"num_experts {routing.num_experts} must be a multiple of 4": routing.num_experts % 4 == 0,
        f"num_kept_groups {routing.num_kept_groups} must not exceed {MAX_KEPT_GROUPS}": routing.num_kept_groups
        <= MAX_KEPT_GROUPS,
        f"top_k {routing.top_k} must not exceed {MAX_GROUPED_TOP_K}": routing.top_k <= MAX_GROUPED_TOP_K,
        f"top_k {routing.top_k} must be below the {num_kept} experts of the kept groups": routing.top_k < num_kept,
    }
    return next((rule for rule, holds in limits.items() if not holds), None)


def _prepare_fp8_tensor(
    experts: ExpertWeights, logits_dtype: torch.dtype | None, topology: Topology
) -> FlashinferTrtllmFp8TensorQuantInfo:
    w13, w2 = matrices(experts, Fp8TensorWeight, topology.device)
    input_scale, mid_scale = layer_input_scales(experts, topology)
    data13, scale13_E = one_scale_fp8(w13)
    return FlashinferTrtllmFp8TensorQuantInfo(
        w13=shuffled(up_gate(data13.view(torch.uint8)), gated=True).view(E4M3),
        w2=shuffled(w2.data.view(torch.uint8), gated=False).view(E4M3),
        input_scale=input_scale,
        output1_scale=scale13_E * input_scale / mid_scale,
        output1_gate_scale=scale13_E * input_scale,
        output2_scale=w2.scale * mid_scale,
        logits_dtype=logits_dtype,
        topology=topology,
    )


def _prepare_nvfp4(
    experts: ExpertWeights, logits_dtype: torch.dtype | None, topology: Topology
) -> FlashinferTrtllmNvfp4QuantInfo:
    w13, w2 = matrices(experts, Nvfp4Weight, topology.device)
    input_scale, mid_scale = layer_input_scales(experts, topology)
    scales13, scale13_E = one_scale_nvfp4(w13)
    return FlashinferTrtllmNvfp4QuantInfo(
        w13=shuffled(up_gate(w13.codes), gated=True),
        w13_scale=shuffled_scales(up_gate(scales13), gated=True, group=16),
        w2=shuffled(w2.codes, gated=False),
        w2_scale=shuffled_scales(w2.scales, gated=False, group=16),
        input_quant=input_scale.reciprocal().reshape(1),
        output1_scale=scale13_E * input_scale / mid_scale,
        output1_gate_scale=scale13_E * input_scale,
        output2_scale=w2.scale_2 * mid_scale,
        logits_dtype=logits_dtype,
        topology=topology,
    )


def _weights_and_input(info: QuantInfo, x_TH: torch.Tensor, kernel: Callable[..., object]) -> dict[str, object]:
    """The arguments that differ by format."""
    weights: dict[str, object] = {"gemm1_weights": info.w13, "gemm2_weights": info.w2}
    if isinstance(info, FlashinferTrtllmFp8BlockQuantInfo):
        x_q, x_scale = quantize_token_groups(x_TH)
        return weights | {
            "hidden_states": x_q, "hidden_states_scale": x_scale.T.contiguous(),
            "gemm1_weights_scale": info.w13_scale, "gemm2_weights_scale": info.w2_scale,
            "use_shuffled_weight": False, "weight_layout": 0,  # rows in order, K contiguous
        }  # fmt: skip
    if isinstance(info, FlashinferTrtllmFp8TensorQuantInfo):
        return weights | {
            "hidden_states": to_e4m3(x_TH.float() / info.input_scale),
            "output1_scales_scalar": info.output1_scale, "output1_scales_gate_scalar": info.output1_gate_scale,
            "output2_scales_scalar": info.output2_scale, "use_routing_scales_on_input": False,
        }  # fmt: skip
    flashinfer = common.library()
    x_q, x_scale = flashinfer.fp4_quantize(x_TH, info.input_quant, sf_vec_size=16, is_sf_swizzled_layout=False)
    layout = {}
    if common.takes(kernel, "hidden_states_scale_layout"):
        layout = {"hidden_states_scale_layout": flashinfer.SfLayout.layout_linear}
    absent = ("gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias")
    return weights | dict.fromkeys(absent) | layout | {
        "hidden_states": x_q, "hidden_states_scale": x_scale.view(E4M3),
        "gemm1_weights_scale": info.w13_scale, "gemm2_weights_scale": info.w2_scale,
        "output1_scale_scalar": info.output1_scale, "output1_scale_gate_scalar": info.output1_gate_scale,
        "output2_scale_scalar": info.output2_scale,
    }  # fmt: skip


def _routing(info: QuantInfo, topk: TopKOutput) -> tuple[str, dict[str, object]]:
    """(suffix of the kernel's name, its routing arguments)."""
    methods = common.library("fused_moe").RoutingMethodType
    if not isinstance(topk, BypassedTopK):
        return "_routed_moe", {
            "topk_ids": pack_topk(topk), "routing_bias": None, "top_k": topk.ids.shape[1],
            "n_group": None, "topk_group": None, "routed_scaling_factor": None,  # part of the weights already
            "routing_method_type": methods.TopK.value,
        }  # fmt: skip
    rules, bias = topk.config, topk.correction_bias
    reason = _unsupported_routing(rules)
    if reason:
        raise UnsupportedPathError(f"{NAME}: {reason}")
    is_grouped = rules.method is RoutingMethod.SIGMOID_GROUPED
    if is_grouped and bias is None:
        bias = torch.zeros(rules.num_experts, dtype=torch.float32, device=topk.logits.device)
    if bias is not None and isinstance(info, FlashinferTrtllmFp8TensorQuantInfo):
        bias = bias.to(torch.bfloat16)
    return "_moe", {
        "routing_logits": topk.logits if info.logits_dtype is None else topk.logits.to(info.logits_dtype),
        "routing_bias": bias, "top_k": rules.top_k,
        "n_group": rules.num_groups if is_grouped else None,
        "topk_group": rules.num_kept_groups if is_grouped else None,
        "routed_scaling_factor": rules.routed_scaling_factor,  # multiplied by the kernel, nowhere else
        "routing_method_type": getattr(methods, ROUTING_NAMES[rules.method]).value,
    }  # fmt: skip


@register_fused_func(MoeA2ABackend.NONE, NAME)
def run_flashinfer_trtllm(
    dispatched: DispatchOutput, quant_info: QuantInfo, config: MoeRunnerConfig, state: RunState
) -> StandardCombineInput:
    """Weighted sum over each token's local experts [T, H], bf16."""
    refuse_overlap(state, NAME)
    dispatched = common.standard_tokens(dispatched, NAME)
    if not isinstance(quant_info, QuantInfo):
        raise MoeConfigError(f"{NAME} cannot run a {type(quant_info).__name__}")
    topology, x_TH = quant_info.topology, dispatched.hidden_states.to(config.dtype)
    suffix, routing = _routing(quant_info, dispatched.topk_output)
    kernel = getattr(common.library("fused_moe"), quant_info.kernel + suffix)
    out_TH = topology.alloc_output(tuple(x_TH.shape), config.dtype)
    into = {"output": out_TH} if common.takes(kernel, "output") else {}
    result = kernel(
        num_experts=config.num_experts,
        intermediate_size=quant_info.w13.shape[1] // 2,
        local_expert_offset=topology.expert_range(config.num_experts).start,
        local_num_experts=config.num_local_experts,
        do_finalize=True,
        tune_max_num_tokens=next_power_of_two(x_TH.shape[0]),
        **routing,
        **_weights_and_input(quant_info, x_TH, kernel),
        **into,
    )
    if not into:  # a release whose kernel allocates its own result, bare or in a list
        out_TH.copy_(result if isinstance(result, torch.Tensor) else result[0])
    return dispatched.result(out_TH, topology.is_partial)
