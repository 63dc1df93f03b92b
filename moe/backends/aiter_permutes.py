"""From every transport's layout to aiter's rows and ids, and back. Ids of -1 go to the masked sink slot.

Shape letters: T tokens, R received rows, K top-k, L local experts, M rows per expert, H hidden.
"""

import torch

from moe.backends.aiter import NAME, AiterCoreInput, AiterMoeQuantInfo
from moe.backends.expert_slots import masked_rows
from moe.config import DispatchFormat, MoeRunnerConfig
from moe.registry import register_post_permute, register_pre_permute
from moe.types import (
    DeepepLlCombineInput,
    DeepepLlDispatchOutput,
    DeepepNormalCombineInput,
    DeepepNormalDispatchOutput,
    MoriLlCombineInput,
    MoriLlDispatchOutput,
    MoriNormalCombineInput,
    MoriNormalDispatchOutput,
    RunState,
    StandardCombineInput,
    StandardDispatchOutput,
)


def to_sink(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """int32 ids with every -1 at the mask's last slot. The scalar keeps it capturable: nothing comes from the host."""
    return torch.where(ids < 0, mask.shape[0] - 1, ids).to(torch.int32)


@register_pre_permute(DispatchFormat.STANDARD, NAME)
def standard_to_aiter(
    dispatched: StandardDispatchOutput, quant_info: AiterMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> AiterCoreInput:
    """Global ids; the mask drops other ranks' experts."""
    del config, state
    topk, mask = dispatched.topk_output.to_standard(), quant_info.global_mask
    return AiterCoreInput(
        x_RH=dispatched.hidden_states, scale=dispatched.hidden_states_scale,
        ids_RK=to_sink(topk.ids, mask), weights_RK=topk.weights, mask=mask,
    )  # fmt: skip


@register_post_permute(NAME, DispatchFormat.STANDARD)
def aiter_to_standard(
    out_TH: torch.Tensor,
    dispatched: StandardDispatchOutput,
    quant_info: AiterMoeQuantInfo,
    config: MoeRunnerConfig,
    state: RunState,
) -> StandardCombineInput:
    """One row per token; partial when other ranks hold the rest of the sum."""
    del dispatched, config, state
    return StandardCombineInput(out_TH, is_partial=quant_info.topology.is_partial)


@register_pre_permute(DispatchFormat.DEEPEP_NORMAL, NAME)
def deepep_normal_to_aiter(
    dispatched: DeepepNormalDispatchOutput, quant_info: AiterMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> AiterCoreInput:
    """Local ids, -1 for other ranks' experts."""
    del config, state
    mask = quant_info.local_mask
    return AiterCoreInput(
        x_RH=dispatched.hidden_states, scale=dispatched.hidden_states_scale,
        ids_RK=to_sink(dispatched.topk_ids, mask), weights_RK=dispatched.topk_weights, mask=mask,
    )  # fmt: skip


@register_post_permute(NAME, DispatchFormat.DEEPEP_NORMAL)
def aiter_to_deepep_normal(
    out_RH: torch.Tensor,
    dispatched: DeepepNormalDispatchOutput,
    quant_info: AiterMoeQuantInfo,
    config: MoeRunnerConfig,
    state: RunState,
) -> DeepepNormalCombineInput:
    """One weighted row per received token; the transport adds ranks as they are."""
    del quant_info, config, state
    return DeepepNormalCombineInput(out_RH, dispatched.topk_ids, dispatched.topk_weights)


@register_pre_permute(DispatchFormat.DEEPEP_LL, NAME)
def deepep_ll_to_aiter(
    dispatched: DeepepLlDispatchOutput, quant_info: AiterMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> AiterCoreInput:
    """Every row is a token with one expert and weight 1; rows past the count go to the sink."""
    del config, state
    x_LMH, mask = dispatched.hidden_states, quant_info.local_mask
    num_experts, num_rows = x_LMH.shape[:2]
    ids_R1, ones_R1 = masked_rows(dispatched.masked_m, num_rows)
    scale = dispatched.hidden_states_scale
    return AiterCoreInput(
        x_RH=x_LMH.reshape(num_experts * num_rows, -1),
        scale=None if scale is None else scale.reshape(num_experts * num_rows, -1),
        ids_RK=to_sink(ids_R1, mask), weights_RK=ones_R1, mask=mask,
    )  # fmt: skip


@register_post_permute(NAME, DispatchFormat.DEEPEP_LL)
def aiter_to_deepep_ll(
    out_RH: torch.Tensor,
    dispatched: DeepepLlDispatchOutput,
    quant_info: AiterMoeQuantInfo,
    config: MoeRunnerConfig,
    state: RunState,
) -> DeepepLlCombineInput:
    """Back to [L, M, H], unweighted: the transport multiplies."""
    del quant_info, config, state
    shape = (*dispatched.hidden_states.shape[:2], out_RH.shape[-1])
    return DeepepLlCombineInput(out_RH.view(shape), dispatched.topk_ids, dispatched.topk_weights)


@register_pre_permute(DispatchFormat.MORI_NORMAL, NAME)
@register_pre_permute(DispatchFormat.MORI_LL, NAME)
def mori_to_aiter(
    dispatched: MoriNormalDispatchOutput, quant_info: AiterMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> AiterCoreInput:
    """Global ids; rows past the received count are never looked at."""
    del config, state
    mask = quant_info.global_mask
    return AiterCoreInput(
        x_RH=dispatched.hidden_states, scale=dispatched.hidden_states_scale,
        ids_RK=to_sink(dispatched.topk_ids, mask), weights_RK=dispatched.topk_weights, mask=mask,
        num_rows=dispatched.num_recv_tokens,
    )  # fmt: skip


@register_post_permute(NAME, DispatchFormat.MORI_NORMAL)
@register_post_permute(NAME, DispatchFormat.MORI_LL)
def aiter_to_mori(
    out_RH: torch.Tensor,
    dispatched: MoriNormalDispatchOutput,
    quant_info: AiterMoeQuantInfo,
    config: MoeRunnerConfig,
    state: RunState,
) -> MoriNormalCombineInput:
    """Weighted rows with the sender's own ids, which the combine needs."""
    del quant_info, config, state
    kind = MoriLlCombineInput if isinstance(dispatched, MoriLlDispatchOutput) else MoriNormalCombineInput
    return kind(out_RH, dispatched.origin_topk_ids, dispatched.origin_topk_weights)
