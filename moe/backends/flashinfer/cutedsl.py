"""NVFP4 experts on FlashInfer's CuTe-DSL kernels (SM100), in two incompatible layouts.

v1 (DeepEP low latency): masked grouped GEMMs over [E, M, H] slots, w13 as [gate; up], one alpha per expert.
v2 (no transport, or FlashInfer's): one fused wrapper over tokens and ids, w13 as [up; gate] in groups of 64 rows.
Shape letters: T tokens, E local experts, M slots per expert, I intermediate, H hidden.
"""

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import torch

from moe.backend import DispatchContext, LibraryTuning, matrices, refuse_overlap
from moe.backends.flashinfer import common
from moe.config import DispatchDtype, DispatchFormat, MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.errors import MoeConfigError, UnsupportedPathError
from moe.formats import ExpertWeights, Nvfp4Weight
from moe.layouts.rows import interleave_halves, mma_view, swizzle_128x4, up_gate
from moe.layouts.static_scales import expert_input_scales, layer_input_scales, one_scale_nvfp4
from moe.overlap import DownGemmOverlap, SignalKind
from moe.registry import register_backend, register_fused_func
from moe.routing import StandardTopK
from moe.topology import Topology
from moe.types import (
    DeepepLlDispatchOutput,
    DispatchOutput,
    FlashinferCombineInput,
    FlashinferDispatchOutput,
    Quantize,
    RowsCombineInput,
    RunState,
    StandardCombineInput,
    StandardDispatchOutput,
)

NAME = MoeBackend.FLASHINFER_CUTEDSL
ARCHS = ("sm100", "sm103")


class CuteDslLayout(enum.StrEnum):
    """Which kernels a quant info is laid out for."""

    V1 = "v1"
    V2 = "v2"


class Wrapper(Protocol):
    """The library's fused MoE object."""

    @property
    def run(self) -> Callable[..., torch.Tensor]:
        """From tokens, ids and weights to the weighted sum [T, H]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CuteDslFp4MoeQuantInfo:
    """Processed weights of either layout; the wrapper's presence must agree with `layout`.

    `input_quant` and `mid_quant` are reciprocal activation scales: v1 [E], v2 [1] for all experts of the layer.
    `use_nvfp4_dispatch`: tokens arrive quantized (v1); a dispatch that does not match is refused.
    """

    layout: CuteDslLayout
    w13: torch.Tensor  # u8 [E, 2I, H/2]
    w13_scale: torch.Tensor  # e4m3: v1 swizzled [E, 2I, H/16]; v2 the MMA view of it
    w2: torch.Tensor  # u8 [E, H, I/2]
    w2_scale: torch.Tensor
    input_quant: torch.Tensor
    w13_alpha: torch.Tensor  # fp32 [E]
    mid_quant: torch.Tensor
    w2_alpha: torch.Tensor
    topology: Topology
    wrapper: Wrapper | None = None
    use_nvfp4_dispatch: bool = False
    overlap_args: DownGemmOverlap | None = None

    def __post_init__(self) -> None:
        is_v1 = self.layout is CuteDslLayout.V1
        if is_v1 == (self.wrapper is not None):
            raise MoeConfigError(
                f"layout {self.layout} {'has no' if is_v1 else 'needs a'} wrapper: layouts are mixed up"
            )
        num_local = self.w13.shape[0]
        num_scales = num_local if is_v1 else 1
        for name, size in (
            ("input_quant", num_scales), ("mid_quant", num_scales), ("w13_alpha", num_local), ("w2_alpha", num_local),
        ):  # fmt: skip
            tensor = getattr(self, name)
            if tensor.dtype != torch.float32 or tuple(tensor.shape) != (size,):
                raise MoeConfigError(
                    f"{name} must be float32 [{size}] in layout {self.layout}, got {tensor.dtype} {tuple(tensor.shape)}"
                )


def is_flashinfer_cutedsl_v1_path(backend: MoeBackend, a2a: MoeA2ABackend) -> bool:
    """Whether a path uses v1; all other paths use v2."""
    return backend is NAME and a2a is MoeA2ABackend.DEEPEP


@register_backend
class FlashinferCutedslBackend(common.FlashinferBackend[CuteDslFp4MoeQuantInfo]):
    """Block-scaled FP4 GEMMs; the topology's transport chooses the layout."""

    name = NAME
    auto_order = 20
    hardware = "SM100/SM103 (Blackwell)"
    formats = MappingProxyType({"nvfp4": replace(common.NVFP4, archs=ARCHS, multiples=(128, 64))})
    transports = (MoeA2ABackend.NONE, MoeA2ABackend.FLASHINFER, MoeA2ABackend.DEEPEP)
    tunable_with = tuple(a2a for a2a in transports if not is_flashinfer_cutedsl_v1_path(NAME, a2a))
    row_multiple = 128  # scales come in tiles of 128 rows

    def missing_package(self) -> str | None:
        """Also the compiler of CuTe-DSL."""
        missing = super().missing_package()
        if missing is None and not common.library("cute_dsl").is_cute_dsl_available():
            return "the package nvidia-cutlass-dsl"
        return missing

    def dispatch_dtype(self, context: DispatchContext) -> DispatchDtype:
        """NVFP4 if the sender can quantize."""
        if context.dispatch_format in (DispatchFormat.STANDARD, DispatchFormat.DEEPEP_NORMAL):
            return DispatchDtype.BF16
        return DispatchDtype.NVFP4 if context.can_send_nvfp4 and context.knows_input_scale else DispatchDtype.BF16

    def as_computed(self, experts: ExpertWeights, topology: Topology) -> ExpertWeights:
        """The experts with one activation scale for the layer, except that v1's second GEMM has one per expert."""
        seen = super().as_computed(experts, topology)
        if is_flashinfer_cutedsl_v1_path(NAME, topology.a2a):
            return replace(seen, w2=experts.w2)
        return seen

    def dispatch_quantizer(self, quant_info: CuteDslFp4MoeQuantInfo) -> Quantize | None:
        """The quantizer that v2 runs on bf16 tokens; None for v1, whose transport quantizes."""
        return functools.partial(_quantize, quant_info) if quant_info.layout is CuteDslLayout.V2 else None

    def signal_kind(self, arch: str) -> SignalKind:
        """v1's masked GEMM counts the processors that are done with an expert."""
        del arch
        return SignalKind.EXPERTS

    def library_tuning(self, quant_info: CuteDslFp4MoeQuantInfo) -> LibraryTuning | None:
        """FlashInfer chooses the tactics of v2's wrapper; v1's masked GEMMs have none."""
        if quant_info.layout is not CuteDslLayout.V2:
            return None
        return common.tuning_context

    def lay_out(self, experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> CuteDslFp4MoeQuantInfo:
        """Lay the weights out for the kernels that `topology.a2a` leads to.

        Raises:
            WeightFormatError: missing input scales.
        """
        w13, w2 = matrices(experts, Nvfp4Weight, topology.device)
        if is_flashinfer_cutedsl_v1_path(NAME, topology.a2a):
            return _prepare_v1(experts, w13, w2, topology)
        return _prepare_v2(experts, w13, w2, config, topology)


def _prepare_v1(
    experts: ExpertWeights, w13: Nvfp4Weight, w2: Nvfp4Weight, topology: Topology
) -> CuteDslFp4MoeQuantInfo:
    # The sender may quantize, and one token goes to several experts: w13 has one input scale for the whole layer.
    input_scale, _ = layer_input_scales(experts, topology)
    mid_scale_E = expert_input_scales(w2)
    scales13, scale13_E = one_scale_nvfp4(w13)
    return CuteDslFp4MoeQuantInfo(
        layout=CuteDslLayout.V1,
        w13=w13.codes.contiguous(),
        w13_scale=swizzle_128x4(scales13),
        w2=w2.codes.contiguous(),
        w2_scale=swizzle_128x4(w2.scales),
        input_quant=input_scale.reciprocal().repeat(experts.num_experts),
        w13_alpha=scale13_E * input_scale,
        mid_quant=mid_scale_E.reciprocal(),
        w2_alpha=w2.scale_2 * mid_scale_E,
        topology=topology,
        use_nvfp4_dispatch=topology.dispatch_dtype is DispatchDtype.NVFP4,
    )


def _prepare_v2(
    experts: ExpertWeights, w13: Nvfp4Weight, w2: Nvfp4Weight, config: MoeRunnerConfig, topology: Topology
) -> CuteDslFp4MoeQuantInfo:
    input_scale, mid_scale = layer_input_scales(experts, topology)
    scales13, scale13_E = one_scale_nvfp4(w13)
    return CuteDslFp4MoeQuantInfo(
        layout=CuteDslLayout.V2,
        w13=interleave_halves(up_gate(w13.codes)),
        w13_scale=mma_view(swizzle_128x4(interleave_halves(up_gate(scales13.view(torch.uint8))).view(scales13.dtype))),
        w2=w2.codes.contiguous(),
        w2_scale=mma_view(swizzle_128x4(w2.scales)),
        input_quant=input_scale.reciprocal().reshape(1),
        w13_alpha=scale13_E * input_scale,  # the alphas must match the scalar scales, not the experts' own
        mid_quant=mid_scale.reciprocal().reshape(1),
        w2_alpha=w2.scale_2 * mid_scale,
        topology=topology,
        wrapper=_build_wrapper(config, topology),
    )


def _build_wrapper(config: MoeRunnerConfig, topology: Topology) -> Wrapper:
    """The library's object with its streams and buffers: built at load, and outside inference mode."""
    wrapper_class = common.library().CuteDslMoEWrapper
    limits = {"max_num_tokens": config.max_num_tokens} if common.takes(wrapper_class, "max_num_tokens") else {}
    with torch.inference_mode(mode=False):
        wrapper: Wrapper = wrapper_class(
            num_experts=config.num_experts,
            top_k=config.top_k,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            use_cuda_graph=topology.device.type == "cuda",
            num_local_experts=config.num_local_experts,
            local_expert_offset=topology.expert_range(config.num_experts).start,
            output_dtype=config.dtype,
            device=str(topology.device),
            **limits,
        )
    return wrapper


@register_fused_func(MoeA2ABackend.DEEPEP, NAME, formats=(DispatchFormat.DEEPEP_LL,))
def run_v1(
    dispatched: DispatchOutput, quant_info: CuteDslFp4MoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> RowsCombineInput:
    """Unweighted expert outputs [E, M, H], bf16; rows from `masked_m` on are not written."""
    if not isinstance(dispatched, DeepepLlDispatchOutput):
        raise UnsupportedPathError(f"{NAME} with deepep takes the low-latency format, got {dispatched.format}")
    _need_layout(quant_info, CuteDslLayout.V1)
    overlap = state.overlap_args
    if overlap is not None and not isinstance(overlap, DownGemmOverlap):
        raise MoeConfigError(f"{NAME} overlaps by a DownGemmOverlap, got {type(overlap).__name__}")
    flashinfer, masked_m = common.library(), dispatched.masked_m
    if quant_info.use_nvfp4_dispatch:
        x_q, x_scale = _arrived_quantized(dispatched)
    else:
        x_EMH = _arrived_bf16(dispatched)
        x_q, x_scale = flashinfer.scaled_fp4_grouped_quantize(x_EMH, masked_m, quant_info.input_quant)
    num_slots = x_q.shape[0]
    if num_slots % 128:
        raise MoeConfigError(
            f"{NAME}: {num_slots} slots per expert (ranks * --deepep-max-dispatch-tokens) must be a multiple of 128"
        )
    num_local, num_rows = quant_info.w13.shape[:2]
    h_EMF = torch.empty((num_local, num_slots, num_rows), dtype=config.dtype, device=x_q.device)
    _masked_gemm((x_q, x_scale), quant_info.w13, quant_info.w13_scale, quant_info.w13_alpha, h_EMF, masked_m)
    mid = flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize(h_EMF, masked_m, quant_info.mid_quant)
    out_EMH = quant_info.topology.alloc_output((num_local, num_slots, config.hidden_size), config.dtype)
    options: dict[str, object] = {}
    if overlap is not None:
        options = {"sm_count": overlap.num_sms, "dst_signals": overlap.signals}
        overlap.start()
    _masked_gemm(mid, quant_info.w2, quant_info.w2_scale, quant_info.w2_alpha, out_EMH, masked_m, **options)
    return dispatched.result(out_EMH, quant_info.topology.is_partial)


def _masked_gemm(
    lhs: tuple[torch.Tensor, torch.Tensor],
    weight_ENK: torch.Tensor,
    scale_ENS: torch.Tensor,
    alpha_E: torch.Tensor,
    out_EMN: torch.Tensor,
    masked_m: torch.Tensor,
    **options: object,
) -> None:
    """out[e, :masked_m[e]] = alpha[e] * lhs[e] @ weight[e].T; the library names axes (m, k, e) over the same memory."""
    common.library("gemm").grouped_gemm_nt_masked(
        lhs,
        (weight_ENK.permute(1, 2, 0), mma_view(scale_ENS)),
        out=out_EMN.permute(1, 2, 0),
        masked_m=masked_m,
        ab_dtype="float4_e2m1fn",
        sf_dtype="float8_e4m3fn",
        c_dtype="bfloat16",
        sf_vec_size=16,
        alpha=alpha_E,
        alpha_dtype="float32",
        **options,
    )


def _arrived_bf16(dispatched: DeepepLlDispatchOutput) -> torch.Tensor:
    x = dispatched.hidden_states
    if x.dtype != torch.bfloat16 or dispatched.hidden_states_scale is not None:
        raise MoeConfigError(f"{NAME}: the dispatch sent {x.dtype}, but the layer was prepared for bfloat16 tokens")
    if x.stride(-1) != 1:
        raise MoeConfigError(f"{NAME}: each of the tokens [E, M, H] must be contiguous, got strides {x.stride()}")
    return x.contiguous()  # a copy where the transport padded the columns: the quantizer takes no pitch


def _arrived_quantized(dispatched: DeepepLlDispatchOutput) -> tuple[torch.Tensor, torch.Tensor]:
    """Received codes (M, H/2, E) and scales (32, 4, M/128, 4, H/64, E), both views with E outermost in memory."""
    codes, scale = dispatched.hidden_states, dispatched.hidden_states_scale
    if codes.dtype != torch.uint8 or scale is None:
        raise MoeConfigError(f"{NAME}: the dispatch sent {codes.dtype}, but the layer was prepared for NVFP4 tokens")
    scale = scale.view(torch.float8_e4m3fn)
    for name, tensor, order in (("codes", codes, (2, 0, 1)), ("scales", scale, (5, 2, 4, 0, 1, 3))):
        if tensor.dim() != len(order) or not tensor.permute(order).is_contiguous():
            raise MoeConfigError(
                f"{NAME}: NVFP4 {name} {tuple(tensor.shape)} have strides {tensor.stride()}: another memory layout"
            )
    return codes, scale


@register_fused_func(MoeA2ABackend.NONE, NAME)
@register_fused_func(MoeA2ABackend.FLASHINFER, NAME)
def run_v2(
    dispatched: DispatchOutput, quant_info: CuteDslFp4MoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> StandardCombineInput | FlashinferCombineInput:
    """Weighted sum over each token's local experts [T, H], bf16."""
    refuse_overlap(state, NAME)
    if not isinstance(dispatched, StandardDispatchOutput | FlashinferDispatchOutput):
        raise UnsupportedPathError(f"{NAME} takes standard or flashinfer tokens here, got {dispatched.format}")
    _need_layout(quant_info, CuteDslLayout.V2)
    if quant_info.wrapper is None:
        raise MoeConfigError(f"layout {quant_info.layout} needs a wrapper: layouts are mixed up")
    topology = quant_info.topology
    x_q, x_scale = dispatched.hidden_states, dispatched.hidden_states_scale
    if x_scale is None:
        x_q, x_scale = _quantize(quant_info, x_q.to(config.dtype))
    topk = _without_holes(dispatched.topk_output.to_standard(), config, topology)
    result = quant_info.wrapper.run(
        x=x_q,
        x_sf=x_scale,
        token_selected_experts=topk.ids,
        token_final_scales=topk.weights,
        w1_weight=quant_info.w13, w1_weight_sf=quant_info.w13_scale, w1_alpha=quant_info.w13_alpha,
        fc2_input_scale=quant_info.mid_quant,
        w2_weight=quant_info.w2, w2_weight_sf=quant_info.w2_scale, w2_alpha=quant_info.w2_alpha,
    )  # fmt: skip
    out_TH = topology.alloc_output(tuple(result.shape), config.dtype)
    out_TH.copy_(result)  # the wrapper allocates its own
    return dispatched.result(out_TH, topology.is_partial)


def _quantize(quant_info: CuteDslFp4MoeQuantInfo, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 codes [T, H/2] and linear scales [T, H/16] under the layer's scale."""
    codes, scale = common.library().fp4_quantize(
        x_TH, quant_info.input_quant, sf_vec_size=16, is_sf_swizzled_layout=False
    )
    return codes, scale


def _without_holes(topk: StandardTopK, config: MoeRunnerConfig, topology: Topology) -> StandardTopK:
    """Replace ids of -1 by a valid expert with weight 0, on another rank if there is one."""
    elsewhere = topology.expert_range(config.num_experts).stop % config.num_experts
    is_used = topk.ids >= 0
    return StandardTopK(torch.where(is_used, topk.weights, 0.0), torch.where(is_used, topk.ids, elsewhere))


def _need_layout(quant_info: object, layout: CuteDslLayout) -> None:
    if not isinstance(quant_info, CuteDslFp4MoeQuantInfo) or quant_info.layout is not layout:
        found = getattr(quant_info, "layout", type(quant_info).__name__)
        raise MoeConfigError(f"{NAME}: this transport runs layout {layout}, the weights are {found}")
