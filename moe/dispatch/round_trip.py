"""Checks a transport at start: tokens must reach their experts and come back. Known factors stand in for the experts.

All ranks call it at the same point. It does not check weights; the self-check of each layer does.
Shape letters: T tokens, K top-k, R received rows, E local experts, M rows per expert, S scale groups, H hidden.
"""

import torch

from moe.config import DispatchDtype, DispatchFormat, MoeRunnerConfig
from moe.dispatch.base import AnyExchange, mode_options
from moe.errors import MoeConfigError, SelfCheckError
from moe.formats.fp4 import decode_e2m1
from moe.formats.fp8 import E4M3, FNUZ
from moe.formats.nvfp4 import GROUP
from moe.formats.token_groups import dequantize_token_groups, unpack_ue8m0
from moe.routing import StandardTopK
from moe.topology import Topology
from moe.types import (
    CombineInput,
    DeepepLlDispatchOutput,
    DeepepNormalDispatchOutput,
    DispatchOutput,
    FlashinferDispatchOutput,
    MoriDispatchOutput,
    StandardDispatchOutput,
)

MAX_TOKENS = 16
# Relative error of the worst token: rounding to the dispatch dtype, then of bf16 sums. One wrong expert gives 0.2.
TOLERANCES = {
    DispatchDtype.BF16: 2e-2,
    DispatchDtype.FP8: 6e-2,
    DispatchDtype.FP8_UE8M0: 6e-2,
    DispatchDtype.NVFP4: 1.6e-1,
}


def check_round_trip(
    dispatcher: AnyExchange,
    dispatch_formats: tuple[DispatchFormat, ...],
    config: MoeRunnerConfig,
    topology: Topology,
    *,
    max_num_tokens: int,
    input_scale: float | None = None,
) -> float:
    """Largest relative error of any token in any of the formats, within the tolerance of the dispatch dtype.

    `max_num_tokens`: the most tokens a rank may send. `input_scale`: the layer's static one, for an NVFP4 dispatch.

    Raises:
        SelfCheckError: a token came back wrong. The message names transport, layout, rank and token.
    """
    x_TH, topk = _probe(config, topology, min(MAX_TOKENS, max_num_tokens), input_scale)
    factor_TK = torch.where(topk.ids >= 0, topk.weights * _factor(topk.ids), 0.0)
    want_TH = x_TH.float() * factor_TK.sum(1, keepdim=True)
    tolerance, worst = TOLERANCES[topology.dispatch_dtype], 0.0
    for dispatch_format in dispatch_formats:
        options = mode_options(dispatch_formats, is_decode=dispatch_format is DispatchFormat.DEEPEP_LL)
        dispatched = dispatcher.dispatch(x_TH, topk, **options)
        got_TH = dispatcher.combine(_compute(dispatched, config, topology, input_scale)).float()
        error_T = (got_TH - want_TH).norm(dim=1) / want_TH.norm(dim=1)
        error, token = error_T.nan_to_num(nan=float("inf")).max(0)
        if not error <= tolerance:
            raise SelfCheckError(
                f"transport {topology.a2a} ({dispatch_format}, {topology.dispatch_dtype}): token {int(token)} of rank "
                f"{topology.ep_rank} came back with an error of {float(error):.3g}; the tolerance is {tolerance:.3g}"
            )
        worst = max(worst, float(error))
    return worst


def _factor(ids: torch.Tensor) -> torch.Tensor:
    """The factor that stands in for an expert: 1 to 5, different for neighbouring experts."""
    return 1.0 + ids % 5


def _probe(
    config: MoeRunnerConfig, topology: Topology, num_tokens: int, input_scale: float | None
) -> tuple[torch.Tensor, StandardTopK]:
    """Test tokens: every second one has one expert, the others K; ids step through the experts of all ranks.

    With the transport `none` all ranks have the same tokens; else each has its own.
    """
    seed = 0 if topology.a2a.dispatch_formats == (DispatchFormat.STANDARD,) else topology.ep_rank
    g = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(num_tokens, config.hidden_size, generator=g)
    if input_scale is not None:
        x_TH = x_TH * input_scale * 448.0  # an ordinary token uses the middle of the scales' range
    token_T1, slot_K = torch.arange(num_tokens)[:, None], torch.arange(config.top_k)
    step = max(1, config.num_experts // config.top_k)
    ids_TK = (seed + token_T1 * (step + 1) + slot_K * step) % config.num_experts
    ids_TK = torch.where((token_T1 % 2 == 0) & (slot_K > 0), -1, ids_TK).to(torch.int32)
    weights_TK = 0.5 + torch.rand(num_tokens, config.top_k, generator=g)
    device = topology.device
    return x_TH.to(device, config.dtype), StandardTopK(weights_TK.to(device), ids_TK.to(device))


def _compute(
    dispatched: DispatchOutput, config: MoeRunnerConfig, topology: Topology, input_scale: float | None
) -> CombineInput:
    """The combine input of experts that only multiply by their factor."""
    own = topology.expert_range(config.num_experts)
    x = _decoded(dispatched.hidden_states, dispatched.hidden_states_scale, input_scale)
    if isinstance(dispatched, DeepepLlDispatchOutput):
        factor_E = _factor(torch.arange(own.start, own.stop, device=x.device))
        rows = x * factor_E[:, None, None]
    elif isinstance(dispatched, DeepepNormalDispatchOutput):
        ids = torch.where(dispatched.topk_ids >= 0, dispatched.topk_ids + own.start, -1)
        rows = _weighted(x, ids, dispatched.topk_weights, own)
    elif isinstance(dispatched, MoriDispatchOutput):
        rows = _weighted(x, dispatched.topk_ids, dispatched.topk_weights, own)
    elif isinstance(dispatched, StandardDispatchOutput | FlashinferDispatchOutput):
        topk = dispatched.topk_output.to_standard()
        rows = _weighted(x, topk.ids, topk.weights, own)
        if isinstance(dispatched, StandardDispatchOutput):
            rows = rows / topology.tp_size  # tensor-parallel ranks hold parts of the same experts
    else:
        raise MoeConfigError(f"the round trip does not know the dispatch format {dispatched.format}")
    return dispatched.result(rows.to(config.dtype), topology.is_partial)


def _weighted(x_RH: torch.Tensor, ids_RK: torch.Tensor, weights_RK: torch.Tensor, own: range) -> torch.Tensor:
    is_own_RK = (ids_RK >= own.start) & (ids_RK < own.stop)
    factor_R1 = torch.where(is_own_RK, weights_RK * _factor(ids_RK), 0.0).sum(1, keepdim=True)
    return torch.where(factor_R1 == 0, 0.0, x_RH * factor_R1)  # unfilled rows may hold NaN


def _decoded(x: torch.Tensor, scale: torch.Tensor | None, input_scale: float | None) -> torch.Tensor:
    """Dequantize received tokens to fp32."""
    if scale is None:
        return x.float()
    if x.dtype in (E4M3, FNUZ):
        return dequantize_token_groups(
            x, unpack_ue8m0(scale, x.shape[-1] // 128) if scale.dtype == torch.int32 else scale
        )
    if scale.dim() == 6:  # low latency: (M, H/2, E) and the view that tensor cores read
        x = x.permute(2, 0, 1)
        row_M1 = torch.arange(x.shape[1], device=x.device)[:, None]
        col_S = torch.arange(x.shape[2] * 2 // GROUP, device=x.device)
        scale = scale[row_M1 % 32, row_M1 % 128 // 32, row_M1 // 128, col_S % 4, col_S // 4].permute(2, 0, 1)
    groups = decode_e2m1(x).unflatten(-1, (-1, GROUP)) * scale.view(torch.float8_e4m3fn).float()[..., None]
    return groups.flatten(-2) * (input_scale or 1.0)
