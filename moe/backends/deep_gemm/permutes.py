"""From every transport's layout to DeepGEMM's two, and back.

Who multiplies by the router weights: the sum here for `none` and DeepEP normal, DeepEP's combine for low latency.
Shape letters: T tokens, K top-k, R rows, E local experts, M rows per expert, G groups of 128 columns, H hidden.
"""

from dataclasses import dataclass

import torch

from moe.backends.deep_gemm.backend import NAME, SEGMENT, ContiguousInput, DeepGemmMoeQuantInfo, MaskedInput
from moe.config import DispatchFormat, MoeRunnerConfig
from moe.errors import MoeConfigError, UnsupportedPathError
from moe.formats.token_groups import quantize_token_groups
from moe.layouts.deep_gemm import activation_scales
from moe.layouts.expert_slots import count_slots, local_ids, permute_rows, take_rows, token_of_row, unpermute_sum
from moe.registry import register_post_permute, register_pre_permute
from moe.topology import Topology
from moe.types import (
    DeepepLlDispatchOutput,
    DeepepNormalDispatchOutput,
    RowsCombineInput,
    RunState,
    StandardCombineInput,
    StandardDispatchOutput,
)

MASKED_UP_TO = 256  # tokens; up to here, room for all tokens at every expert costs less than reading the counts


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Where every routed slot went: int64 rows [T, K], -1 without an expert here, and fp32 weights [T, K]."""

    row_TK: torch.Tensor
    weights_TK: torch.Tensor


@register_pre_permute(DispatchFormat.STANDARD, NAME)
def standard_to_deep_gemm(
    dispatched: StandardDispatchOutput, quant_info: DeepGemmMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> MaskedInput | ContiguousInput:
    """Few tokens go to the masked layout, which graphs can capture; many to the contiguous one (one host read)."""
    topk = dispatched.topk_output.to_standard()
    ids_TK = local_ids(topk.ids, quant_info.topology.expert_range(config.num_experts))
    x_TH, scale_TG = quantize_token_groups(dispatched.hidden_states, ue8m0=quant_info.ue8m0)
    counts_E = count_slots(ids_TK, config.num_local_experts)
    num_tokens, num_experts = x_TH.shape[0], config.num_local_experts
    if num_tokens > MASKED_UP_TO:
        num_rows_E = [-(-count // SEGMENT) * SEGMENT for count in counts_E.tolist()]
        num_rows_E[0] = num_rows_E[0] or (0 if any(num_rows_E) else SEGMENT)  # the kernel wants rows, real or not
        return _contiguous(x_TH, scale_TG, ids_TK, topk.weights, num_rows_E, quant_info, state)
    rows_per_expert = (num_tokens // 256 + 1) * 256
    first_row_E = torch.arange(num_experts, device=x_TH.device) * rows_per_expert
    row_TK = permute_rows(ids_TK, first_row_E)
    state.permute = SlotRows(row_TK, topk.weights)
    source_R = token_of_row(row_TK, num_experts * rows_per_expert)
    scale_EMG = take_rows(scale_TG, source_R).view(num_experts, rows_per_expert, -1)
    return MaskedInput(
        x=take_rows(x_TH, source_R).view(num_experts, rows_per_expert, -1),
        scale=activation_scales(scale_EMG, ue8m0=quant_info.ue8m0),
        masked_m=counts_E.to(torch.int32),
        expected_m=-(-num_tokens * config.top_k // config.num_experts),
    )


@register_post_permute(NAME, DispatchFormat.DEEPEP_NORMAL)
@register_post_permute(NAME, DispatchFormat.STANDARD)
def deep_gemm_to_standard(
    out: torch.Tensor,
    dispatched: StandardDispatchOutput | DeepepNormalDispatchOutput,
    quant_info: DeepGemmMoeQuantInfo,
    config: MoeRunnerConfig,
    state: RunState,
) -> StandardCombineInput | RowsCombineInput:
    """Weighted sum of every token's rows, behind DeepEP of every received token's; partial without a transport."""
    del config
    topology = quant_info.topology
    return dispatched.result(_summed(out, topology, state), topology.is_partial)


@register_pre_permute(DispatchFormat.DEEPEP_NORMAL, NAME)
def deepep_normal_to_deep_gemm(
    dispatched: DeepepNormalDispatchOutput, quant_info: DeepGemmMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> ContiguousInput:
    """Every received token is copied to a segment of each of its local experts; the counts are known on the host."""
    del config
    num_rows_E = dispatched.num_recv_tokens_per_expert
    if any(count % SEGMENT for count in num_rows_E):
        raise UnsupportedPathError(f"{NAME} needs a dispatch with expert_alignment {SEGMENT}, got counts {num_rows_E}")
    scale_RG = _need_scale(dispatched.hidden_states_scale)
    x_RH, ids_RK, weights_RK = dispatched.hidden_states, dispatched.topk_ids, dispatched.topk_weights
    return _contiguous(x_RH, scale_RG, ids_RK, weights_RK, num_rows_E, quant_info, state)


@register_pre_permute(DispatchFormat.DEEPEP_LL, NAME)
def deepep_ll_to_deep_gemm(
    dispatched: DeepepLlDispatchOutput, quant_info: DeepGemmMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> MaskedInput:
    """The layout is the kernel's own; its M-major scales are passed as they come."""
    del config, state
    scale = _need_scale(dispatched.hidden_states_scale)
    if (scale.dtype == torch.int32) != quant_info.ue8m0:
        raise UnsupportedPathError(
            f"{NAME} on this device wants {'packed power-of-two' if quant_info.ue8m0 else 'fp32'} scales, but the "
            f"transport sent {scale.dtype}"
        )
    return MaskedInput(
        x=dispatched.hidden_states.contiguous(),  # a copy only where the transport padded the columns
        scale=activation_scales(scale, ue8m0=quant_info.ue8m0),
        masked_m=dispatched.masked_m,
        expected_m=dispatched.expected_m,
    )


def _need_scale(scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        raise UnsupportedPathError(f"--moe-backend {NAME} takes tokens in FP8, but the transport sent bf16")
    return scale


def _contiguous(
    x_TH: torch.Tensor,
    scale_TG: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    num_rows_E: list[int],
    quant_info: DeepGemmMoeQuantInfo,
    state: RunState,
) -> ContiguousInput:
    """Segments end to end, each as long as `num_rows_E` says; rows that pad a segment repeat some token."""
    rows_E = torch.tensor(num_rows_E, dtype=torch.int64, device=x_TH.device)
    row_TK = permute_rows(ids_TK, torch.cumsum(rows_E, 0) - rows_E)
    state.permute = SlotRows(row_TK, weights_TK)
    num_rows = sum(num_rows_E)
    source_R = token_of_row(row_TK, num_rows)
    experts_E = torch.arange(len(num_rows_E), dtype=torch.int32, device=x_TH.device)
    return ContiguousInput(
        x=take_rows(x_TH, source_R),
        scale=activation_scales(take_rows(scale_TG, source_R), ue8m0=quant_info.ue8m0),
        m_indices=experts_E.repeat_interleave(rows_E, output_size=num_rows),
    )


def _summed(out: torch.Tensor, topology: Topology, state: RunState) -> torch.Tensor:
    slots = state.permute
    if not isinstance(slots, SlotRows):
        raise MoeConfigError(f"{NAME}: the pre-permute of this run left no record of its rows")
    summed_TH = unpermute_sum(out.flatten(0, -2), slots.row_TK, slots.weights_TK)
    result = topology.alloc_output(tuple(summed_TH.shape), out.dtype)
    return result.copy_(summed_TH)
