"""Pre-permutes from every transport's layout to aiter's rows and ids. Results are in the transport's layout already.

aiter has two kinds of calls. Without an expert mask, all ids must be experts of this rank, and distinct within a row.
With a mask, the last column must hold ids that are always masked: aiter subtracts one from top-k before it looks up
tuned kernels, so without that column it finds none, and with top-1 it divides by zero. Neither kind supports -1.
Shape letters: T tokens, R received rows, K top-k, L local experts, M rows per expert, H hidden.
"""

import torch

from moe.backends.aiter.backend import NAME, AiterCoreInput, AiterMoeQuantInfo
from moe.config import DispatchFormat, MoeRunnerConfig
from moe.layouts.expert_slots import masked_rows
from moe.registry import register_pre_permute
from moe.routing import StandardTopK
from moe.types import (
    DeepepLlDispatchOutput,
    DeepepNormalDispatchOutput,
    MoriDispatchOutput,
    RunState,
    StandardDispatchOutput,
)

Routed = tuple[torch.Tensor, torch.Tensor]


def with_sink(ids_RK: torch.Tensor, weights_RK: torch.Tensor, mask: torch.Tensor) -> Routed:
    """int32 ids and weights [R, K + 1] for a masked call: -1 and the last column become the sink, the mask's last id.

    Uses scalars instead of tensors, so nothing is copied from the host and graphs can capture it.
    """
    sink = mask.shape[0] - 1
    ids = torch.nn.functional.pad(torch.where(ids_RK < 0, sink, ids_RK).to(torch.int32), (0, 1), value=sink)
    return ids, torch.nn.functional.pad(weights_RK, (0, 1))


def without_holes(ids_RK: torch.Tensor, weights_RK: torch.Tensor, num_experts: int) -> Routed:
    """int32 ids and weights [R, K] for a call without a mask: -1 becomes an expert with weight 0.

    Each -1 becomes a different expert that is not in the row yet, because aiter's sorting drops repeated ids of a row.
    """
    num_candidates = min(num_experts, 2 * ids_RK.shape[1] - 1)  # among this many, K are free
    candidates_C = torch.arange(num_candidates, device=ids_RK.device)
    is_free_RC = (ids_RK[:, :, None] != candidates_C).all(1)
    hole_RK = ids_RK < 0
    nth_hole_RK1 = hole_RK.cumsum(1)[:, :, None]
    is_nth_RKC = is_free_RC[:, None, :] & (is_free_RC.cumsum(1)[:, None, :] == nth_hole_RK1)
    filler_RK = is_nth_RKC.int().argmax(2)
    return torch.where(hole_RK, filler_RK, ids_RK).to(torch.int32), torch.where(hole_RK, 0.0, weights_RK)


def routed(ids_RK: torch.Tensor, weights_RK: torch.Tensor, mask: torch.Tensor | None, num_experts: int) -> Routed:
    """Ids and weights for a call with `mask`, or without one if it is None."""
    if mask is None:
        return without_holes(ids_RK, weights_RK, num_experts)
    return with_sink(ids_RK, weights_RK, mask)


def _input(
    dispatched: StandardDispatchOutput | DeepepNormalDispatchOutput, topk: StandardTopK, mask: torch.Tensor | None,
    num_experts: int,
) -> AiterCoreInput:  # fmt: skip
    """Rows as they were dispatched. `num_experts` is the size of the id space that `topk` and `mask` use."""
    ids_RK, weights_RK = routed(topk.ids, topk.weights, mask, num_experts)
    return AiterCoreInput(
        x_RH=dispatched.hidden_states, scale=dispatched.hidden_states_scale,
        ids_RK=ids_RK, weights_RK=weights_RK, mask=mask,
    )  # fmt: skip


@register_pre_permute(DispatchFormat.STANDARD, NAME)
def standard_to_aiter(
    dispatched: StandardDispatchOutput, quant_info: AiterMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> AiterCoreInput:
    """Global ids; the mask drops other ranks' experts."""
    del state
    topk, mask = dispatched.topk_output.to_standard(), quant_info.global_mask
    return _input(dispatched, topk, mask, config.num_experts)


@register_pre_permute(DispatchFormat.DEEPEP_NORMAL, NAME)
def deepep_normal_to_aiter(
    dispatched: DeepepNormalDispatchOutput, quant_info: AiterMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> AiterCoreInput:
    """Local ids, -1 for other ranks' experts."""
    del state
    mask = None if quant_info.global_mask is None else quant_info.local_mask
    topk = StandardTopK(dispatched.topk_weights, dispatched.topk_ids)
    return _input(dispatched, topk, mask, config.num_local_experts)


@register_pre_permute(DispatchFormat.DEEPEP_LL, NAME)
def deepep_ll_to_aiter(
    dispatched: DeepepLlDispatchOutput, quant_info: AiterMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> AiterCoreInput:
    """Every row is a token with one expert and weight 1; rows past the count go to the sink, on one rank too.

    Rows that the transport padded are copied: the kernels take no pitch.
    """
    del config, state
    x_LMH, mask = dispatched.hidden_states, quant_info.local_mask
    num_experts, num_rows = x_LMH.shape[:2]
    ids_R1, ones_R1 = masked_rows(dispatched.masked_m, num_rows)
    ids_RK, weights_RK = with_sink(ids_R1, ones_R1, mask)
    scale = dispatched.hidden_states_scale
    return AiterCoreInput(
        x_RH=x_LMH.contiguous().view(num_experts * num_rows, -1),
        scale=None if scale is None else scale.reshape(num_experts * num_rows, -1),
        ids_RK=ids_RK, weights_RK=weights_RK, mask=mask,
    )  # fmt: skip


@register_pre_permute(DispatchFormat.MORI_NORMAL, NAME)
@register_pre_permute(DispatchFormat.MORI_LL, NAME)
def mori_to_aiter(
    dispatched: MoriDispatchOutput, quant_info: AiterMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> AiterCoreInput:
    """Global ids; rows past the received count are never read.

    mori sends no -1: such a slot arrives with weight 0 and an expert id that the row may have twice.
    """
    del state
    mask, weights_RK = quant_info.global_mask, dispatched.topk_weights
    ids_RK = torch.where(weights_RK == 0, -1, dispatched.topk_ids)
    ids_RK, weights_RK = routed(ids_RK, weights_RK, mask, config.num_experts)
    return AiterCoreInput(
        x_RH=dispatched.hidden_states, scale=dispatched.hidden_states_scale,
        ids_RK=ids_RK, weights_RK=weights_RK, mask=mask,
        num_rows=dispatched.num_recv_tokens,
    )  # fmt: skip
