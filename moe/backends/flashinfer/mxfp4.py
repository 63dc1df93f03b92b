"""MXFP4 experts on FlashInfer, bf16 activations: cutlass mixed GEMM on SM90, TRT-LLM kernel on SM100.

The quant info's type says which kernel it is for. Routing always happens outside (ids and weights).
GPT-OSS (biases) is padded to the kernel's tiles; experts without biases (DeepSeek-V4) must be multiples of them.
Shape letters: T tokens, E local experts, I intermediate, H hidden; p = padded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from moe.backend import FormatSupport, LibraryTuning, Tactic, TacticTable, matrices, refuse_overlap
from moe.backends.flashinfer import common
from moe.backends.flashinfer.profiles import NO_PROFILES, Profiles, profile_lists, profiles_of, proposals
from moe.backends.flashinfer.trtllm_layout import pack_topk, shuffled, shuffled_scales
from moe.config import MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.device import Device
from moe.errors import MoeConfigError
from moe.formats import ExpertWeights, Mxfp4Weight
from moe.formats.sizes import expert_bytes
from moe.layouts.rows import next_power_of_two, padded, round_up, up_gate_padded
from moe.registry import register_backend, register_fused_func
from moe.routing import StandardTopK
from moe.topology import Topology
from moe.types import DispatchOutput, RunState, StandardCombineInput

NAME = MoeBackend.FLASHINFER_MXFP4
GROUP = 32
TILE = {"sm90": 128, "sm100": 256, "sm103": 256}  # rows and columns of padded matrices are multiples of this
WITHOUT_BIASES = FormatSupport(archs=tuple(TILE), multiples=(128, 128), activations=None)
WITH_BIASES = replace(WITHOUT_BIASES, multiples=None, takes_biases=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashinferMxfp4Sm90QuantInfo:
    """Weights for `cutlass_fused_moe`: halves [up; gate], bytes interleaved and scales folded by the library.

    The scale tensors are int32 views in the layout of the installed release, which only its kernel reads.
    """

    w13: torch.Tensor  # u8 [E, 2Ip, Hp/2]
    w13_scale: torch.Tensor
    w2: torch.Tensor  # u8 [E, Hp, Ip/2]
    w2_scale: torch.Tensor
    b13: torch.Tensor | None  # output dtype [E, 2Ip]
    b2: torch.Tensor | None  # output dtype [E, Hp]
    swiglu_alpha: torch.Tensor | None  # fp32 [E], all three or none
    swiglu_beta: torch.Tensor | None
    swiglu_limit: torch.Tensor | None
    padded_hidden_size: int
    topology: Topology
    profiles: Profiles = NO_PROFILES


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashinferMxfp4Sm100QuantInfo:
    """Weights for `trtllm_fp4_block_scale_routed_moe`: up and gate rows alternate, shuffled; scales swizzled too."""

    w13: torch.Tensor  # u8 [E, 2Ip, Hp/2]
    w13_scale: torch.Tensor  # e4m3-typed bytes [E, 2Ip, Hp/32]
    w2: torch.Tensor
    w2_scale: torch.Tensor
    b13: torch.Tensor | None  # fp32, rows in weight order
    b2: torch.Tensor | None
    swiglu_alpha: torch.Tensor | None
    swiglu_beta: torch.Tensor | None
    swiglu_limit: torch.Tensor | None
    padded_hidden_size: int
    padded_intermediate_size: int
    topology: Topology


QuantInfo = FlashinferMxfp4Sm90QuantInfo | FlashinferMxfp4Sm100QuantInfo


@register_backend
class FlashinferMxfp4Backend(common.FlashinferBackend[QuantInfo]):
    """MXFP4 weights times bf16 activations."""

    name = NAME
    auto_order = 30
    hardware = "SM90 (Hopper), SM100/SM103 (Blackwell)"
    minimum_version = (0, 6, 11)  # the first with the weight and scale helpers of the mixed GEMM on SM90
    formats = MappingProxyType({"mxfp4": WITHOUT_BIASES})
    tunable_with = (MoeA2ABackend.NONE,)
    is_capturable = True
    can_move_experts = True

    def layer_bytes(self, format_name: str, config: MoeRunnerConfig, device: Device) -> int:
        """Of matrices padded to the kernel's tiles; the SM100 kernel wants biases in fp32."""
        tile = TILE.get(device.arch, 1)
        sizes = (round_up(config.hidden_size, tile), max(round_up(config.intermediate_size, tile), tile))
        itemsize = config.dtype.itemsize if device.arch == "sm90" else 4
        return config.num_local_experts * expert_bytes(format_name, *sizes, itemsize if config.has_biases else 0)

    def format_support(self, format_name: str, config: MoeRunnerConfig) -> FormatSupport | None:
        """Experts with biases are padded; those without must fit the tiles."""
        is_padded = format_name == "mxfp4" and config.has_biases
        return WITH_BIASES if is_padded else super().format_support(format_name, config)

    def lay_out(self, experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> QuantInfo:
        """Pad, reorder and interleave on `topology.device`; its architecture chooses the layout."""
        arch = common.device_arch(topology.device)
        tile = TILE[arch]
        # A rank that owns no block of the intermediate axis still runs the kernel, on zeros.
        sizes = round_up(experts.hidden_size, tile), max(round_up(experts.intermediate_size, tile), tile)
        build = _prepare_sm90 if arch == "sm90" else _prepare_sm100
        return build(_Staged.of(experts, sizes, topology.device), config, topology)

    def expert_stacks(self, quant_info: QuantInfo) -> Sequence[torch.Tensor]:
        """Weights, scales and biases; what the activation reads is equal for all experts."""
        parts = (
            quant_info.w13,
            quant_info.w13_scale,
            quant_info.w2,
            quant_info.w2_scale,
            quant_info.b13,
            quant_info.b2,
        )
        return [part for part in parts if part is not None]

    def tactics(
        self, quant_info: QuantInfo, config: MoeRunnerConfig, num_tokens: int, measured: Mapping[Tactic, float]
    ) -> Sequence[Tactic]:
        """Profile numbers of the cutlass kernel; FlashInfer tunes the SM100 kernel itself."""
        del num_tokens
        if not isinstance(quant_info, FlashinferMxfp4Sm90QuantInfo):
            return ()
        lists = profile_lists(quant_info, config.dtype, config.top_k, w4_group_scaling=True)
        return proposals(lists, measured)

    def library_tuning(self, quant_info: QuantInfo) -> LibraryTuning | None:
        """For the SM100 kernel, whose tiles FlashInfer chooses."""
        if isinstance(quant_info, FlashinferMxfp4Sm90QuantInfo):
            return None
        return common.tuning_context

    def with_choice(self, quant_info: QuantInfo, choice: TacticTable) -> QuantInfo:
        """The same weights with the chosen profiles."""
        if not isinstance(quant_info, FlashinferMxfp4Sm90QuantInfo):
            return super().with_choice(quant_info, choice)
        return replace(quant_info, profiles=profiles_of(choice))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Staged:
    """Padded bytes in [up; gate] order, before the library's own reordering."""

    codes13: torch.Tensor
    scales13: torch.Tensor
    codes2: torch.Tensor
    scales2: torch.Tensor
    b13: torch.Tensor | None
    b2: torch.Tensor | None
    hidden: int
    intermediate: int

    @classmethod
    def of(cls, experts: ExpertWeights, sizes: tuple[int, int], device: torch.device) -> "_Staged":
        w13, w2 = matrices(experts, Mxfp4Weight, device)
        hidden, intermediate = sizes
        b13 = b2 = None
        if experts.b13 is not None and experts.b2 is not None:
            b13 = up_gate_padded(experts.b13.to(device)[..., None], intermediate, 1)
            b2 = padded(experts.b2.to(device)[..., None], hidden, 1)
        return cls(
            codes13=up_gate_padded(w13.codes, intermediate, hidden // 2),
            scales13=up_gate_padded(w13.scales, intermediate, hidden // GROUP),
            codes2=padded(w2.codes, hidden, intermediate // 2),
            scales2=padded(w2.scales, hidden, intermediate // GROUP),
            b13=b13, b2=b2, hidden=hidden, intermediate=intermediate,
        )  # fmt: skip


def _prepare_sm90(staged: _Staged, config: MoeRunnerConfig, topology: Topology) -> FlashinferMxfp4Sm90QuantInfo:
    fused_moe = common.library("fused_moe")  # both helpers and the kernel must come from one release
    interleave = fused_moe.interleave_moe_weights_for_sm90_mixed_gemm
    fold = fused_moe.interleave_moe_scales_for_sm90_mixed_gemm
    alpha, beta, limit = common.swiglu_tensors(config.activation, staged.codes2.shape[0], topology.device)
    return FlashinferMxfp4Sm90QuantInfo(
        w13=interleave(staged.codes13, "fp4"),
        w13_scale=fold(staged.scales13, group_size=GROUP).view(torch.int32),
        w2=interleave(staged.codes2, "fp4"),
        w2_scale=fold(staged.scales2, group_size=GROUP).view(torch.int32),
        b13=None if staged.b13 is None else staged.b13.squeeze(-1).to(config.dtype),
        b2=None if staged.b2 is None else staged.b2.squeeze(-1).to(config.dtype),
        swiglu_alpha=alpha, swiglu_beta=beta, swiglu_limit=limit,
        padded_hidden_size=staged.hidden,
        topology=topology,
    )  # fmt: skip


def _prepare_sm100(staged: _Staged, config: MoeRunnerConfig, topology: Topology) -> FlashinferMxfp4Sm100QuantInfo:
    alpha, beta, limit = common.swiglu_tensors(config.activation, staged.codes2.shape[0], topology.device)
    b13 = b2 = None
    if staged.b13 is not None and staged.b2 is not None:
        b13 = shuffled(staged.b13.float(), gated=True).squeeze(-1)
        # the kernel knows no tensor-parallel rank, so one rank of the sum carries the bias
        b2 = shuffled(staged.b2.float(), gated=False).squeeze(-1) * (topology.tp_rank == 0)
    return FlashinferMxfp4Sm100QuantInfo(
        w13=shuffled(staged.codes13, gated=True),
        w13_scale=shuffled_scales(staged.scales13, gated=True, group=GROUP),
        w2=shuffled(staged.codes2, gated=False),
        w2_scale=shuffled_scales(staged.scales2, gated=False, group=GROUP),
        b13=b13, b2=b2,
        swiglu_alpha=alpha, swiglu_beta=beta, swiglu_limit=limit,
        padded_hidden_size=staged.hidden,
        padded_intermediate_size=staged.intermediate,
        topology=topology,
    )  # fmt: skip


@register_fused_func(MoeA2ABackend.NONE, NAME)
def run_flashinfer_mxfp4(
    dispatched: DispatchOutput, quant_info: QuantInfo, config: MoeRunnerConfig, state: RunState
) -> StandardCombineInput:
    """Weighted sum over each token's local experts [T, H], bf16. Bypassed routing is done here first."""
    refuse_overlap(state, NAME)
    dispatched = common.standard_tokens(dispatched, NAME)
    if not isinstance(quant_info, QuantInfo):
        raise MoeConfigError(f"{NAME} cannot run a {type(quant_info).__name__}")
    x_TH = dispatched.hidden_states.to(config.dtype)
    num_pad_cols = quant_info.padded_hidden_size - x_TH.shape[1]
    topology = quant_info.topology
    out_TH = topology.alloc_output(tuple(x_TH.shape), config.dtype)
    topk = dispatched.topk_output.to_standard()
    if num_pad_cols:
        wide_TH = torch.nn.functional.pad(x_TH, (0, num_pad_cols))
        result = torch.empty_like(wide_TH)
        _launch(wide_TH, topk, quant_info, config, result)
        out_TH.copy_(result[:, : x_TH.shape[1]])
    else:
        _launch(x_TH, topk, quant_info, config, out_TH)
    return dispatched.result(out_TH, topology.is_partial)


def _launch(
    x_TH: torch.Tensor, topk: StandardTopK, info: QuantInfo, config: MoeRunnerConfig, out_TH: torch.Tensor
) -> None:
    if isinstance(info, FlashinferMxfp4Sm90QuantInfo):
        _run_sm90(x_TH, topk, info, config, out_TH)
    else:
        _run_sm100(x_TH, topk, info, config, out_TH)


def _run_sm90(
    x_TH: torch.Tensor,
    topk: StandardTopK,
    info: FlashinferMxfp4Sm90QuantInfo,
    config: MoeRunnerConfig,
    out_TH: torch.Tensor,
) -> None:
    topology = info.topology
    common.library("fused_moe").cutlass_fused_moe(
        input=x_TH,
        token_selected_experts=topk.ids,  # global ids; the kernel skips -1 and other ranks' experts
        token_final_scales=topk.weights,
        fc1_expert_weights=info.w13,
        fc2_expert_weights=info.w2,
        output_dtype=config.dtype,
        quant_scales=[info.w13_scale, info.w2_scale],
        fc1_expert_biases=info.b13,
        fc2_expert_biases=info.b2,  # added by the kernel where tp_rank is 0
        swiglu_alpha=info.swiglu_alpha, swiglu_beta=info.swiglu_beta, swiglu_limit=info.swiglu_limit,
        tp_size=topology.tp_size, tp_rank=topology.tp_rank,
        ep_size=topology.ep_size, ep_rank=topology.ep_rank,
        output=out_TH,
        use_w4_group_scaling=True,
        tune_max_num_tokens=next_power_of_two(x_TH.shape[0]),
        **info.profiles.arguments(x_TH.shape[0]),
    )  # fmt: skip


def _run_sm100(
    x_TH: torch.Tensor,
    topk: StandardTopK,
    info: FlashinferMxfp4Sm100QuantInfo,
    config: MoeRunnerConfig,
    out_TH: torch.Tensor,
) -> None:
    fused_moe = common.library("fused_moe")
    fused_moe.trtllm_fp4_block_scale_routed_moe(
        topk_ids=pack_topk(topk),
        routing_bias=None,
        hidden_states=x_TH,
        hidden_states_scale=None,
        gemm1_weights=info.w13, gemm1_weights_scale=info.w13_scale, gemm1_bias=info.b13,
        gemm1_alpha=info.swiglu_alpha, gemm1_beta=info.swiglu_beta, gemm1_clamp_limit=info.swiglu_limit,
        gemm2_weights=info.w2, gemm2_weights_scale=info.w2_scale, gemm2_bias=info.b2,
        output1_scale_scalar=None, output1_scale_gate_scalar=None, output2_scale_scalar=None,
        num_experts=config.num_experts,
        top_k=topk.ids.shape[1],
        n_group=None, topk_group=None,
        intermediate_size=info.padded_intermediate_size,
        local_expert_offset=info.topology.expert_range(config.num_experts).start,
        local_num_experts=config.num_local_experts,
        routed_scaling_factor=None,  # part of the weights already
        routing_method_type=fused_moe.RoutingMethodType.TopK.value,
        do_finalize=True,
        output=out_TH,
        tune_max_num_tokens=next_power_of_two(x_TH.shape[0]),
    )  # fmt: skip
