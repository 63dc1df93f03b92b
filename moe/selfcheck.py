"""Compares one layer's prepared weights and path with the twin, expert by expert. Runs while loading, never later.

The tokens reach the path in the layout of every dispatch format it was built for, made here (`dispatch.loopback`).
Every local expert gets tokens of its own, half of them large enough for the clamps to act and half too small for that,
so that neither a wrong clamp nor a wrong weight behind a clamp stays hidden. A few tokens visit several experts.
Shape letters: T tokens, K top-k, E local experts, H hidden, B blocks of 128 outputs.
"""

import dataclasses
from typing import Any

import torch

from moe.config import MoeRunnerConfig
from moe.dispatch.loopback import make_loopback
from moe.dispatch.payload import expert_alignment
from moe.errors import SelfCheckError
from moe.formats import ExpertWeights
from moe.registry import load_backend
from moe.runner import MoeRunner
from moe.topology import Topology
from moe.twin import moe_twin
from moe.types import StandardTopK

BLOCK = 128  # outputs per error figure: one wrong row of scales must not drown among thousands of right ones
TOKENS_PER_EXPERT = 8
NUM_MIXED_TOKENS = 8
LARGE, SMALL = 1.5, 0.25  # typical input of the activation, in units of its limit
_LIMIT_OF_PLAIN = 4.0  # without a limit: where silu is well away from linear


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SelfCheckReport:
    """A layer that passed: its path and the largest relative error of any expert and block."""

    layer: int
    path: str
    worst_error: float
    tolerance: float


def check_layer(
    runner: MoeRunner, quant_info: Any, experts: ExpertWeights, *, layer: int, topology: Topology
) -> SelfCheckReport:
    """Run probe tokens through the path and compare. `experts` are the canonical weights of this rank.

    Besides the tokens it needs memory for one dequantized fp32 matrix.

    Raises:
        SelfCheckError: an expert, or the sum of several, is off by more than the path's tolerance.
    """
    config, backend = runner.config, load_backend(runner.backend)
    tolerance = backend.tolerance_for(experts.format_name, config)
    if experts.b2 is not None and topology.tp_rank:  # another rank adds this bias to the sum
        experts = dataclasses.replace(experts, b2=torch.zeros_like(experts.b2))
    x_TH, topk = _probe(experts, config, topology)
    want_TH = moe_twin(
        x_TH, topk, backend.as_computed(experts, topology), config.activation,
        quantize_input=backend.activation_quant.get(experts.format_name),
        first_expert=topology.expert_range(config.num_experts).start,
    )  # fmt: skip
    path = f"{runner.backend}/{runner.a2a}/{experts.format_name}"
    worst = 0.0
    for dispatch_format in runner.dispatch_formats:
        where = path if len(runner.dispatch_formats) == 1 else f"{path} ({dispatch_format})"
        loopback = make_loopback(
            dispatch_format, config, topology,
            expert_alignment=expert_alignment(runner.backend),
            input_scale=None if experts.layer_input_scales is None else experts.layer_input_scales[0],
        )  # fmt: skip
        got_TH = loopback.combine(runner.run(loopback.dispatch(x_TH, topk), quant_info)).float()
        error_EB = _errors(got_TH, want_TH, experts.num_experts)
        _need_below(tolerance, error_EB, experts, topology.expert_range(config.num_experts), f"layer {layer}, {where}")
        worst = max(worst, float(error_EB.max()))
    return SelfCheckReport(layer=layer, path=path, worst_error=worst, tolerance=tolerance)


def _need_below(tolerance: float, error_EB: torch.Tensor, experts: ExpertWeights, own: range, where: str) -> None:
    """Raise SelfCheckError for the worst expert; if all are right alone, for their sum."""
    for first, last in ((0, len(own)), (len(own), len(own) + 1)):
        worst, index = error_EB[first:last].flatten().max(0)
        row, block = divmod(int(index), error_EB.shape[1])
        if not worst <= tolerance:
            who = f"expert {own.start + row}" if first == 0 else "the sum over several experts"
            end = min(experts.hidden_size, (block + 1) * BLOCK)
            raise SelfCheckError(
                f"{where}: {who} differs from the reference by {float(worst):.3g} "
                f"in outputs {block * BLOCK}..{end - 1}; the tolerance is {tolerance:.3g}"
            )


def _probe(experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> tuple[torch.Tensor, StandardTopK]:
    """Tokens: first `TOKENS_PER_EXPERT` for each local expert, then `NUM_MIXED_TOKENS` for several at once."""
    own = topology.expert_range(config.num_experts)
    num_solo = len(own) * TOKENS_PER_EXPERT
    num_tokens = num_solo + NUM_MIXED_TOKENS
    g = torch.Generator().manual_seed(0)
    x_TH = torch.randn(num_tokens, experts.hidden_size, generator=g)
    weights_TK = 0.5 + torch.rand(num_tokens, config.top_k, generator=g)
    ids_TK = torch.full((num_tokens, config.top_k), -1, dtype=torch.int32)
    if topology.ep_size > 1:  # another rank's expert, which must add nothing here
        ids_TK[:num_solo] = own.stop % config.num_experts
    for token in range(num_solo):
        ids_TK[token, token % config.top_k] = own.start + token // TOKENS_PER_EXPERT
    for token in range(NUM_MIXED_TOKENS):
        for slot in range(min(config.top_k, len(own))):
            ids_TK[num_solo + token, slot] = own.start + (token * config.top_k + slot) % len(own)
    size_E = torch.stack([_input_size(experts, expert, x_TH[0], config) for expert in range(len(own))])
    size_T = torch.cat((size_E.repeat_interleave(TOKENS_PER_EXPERT), size_E.min().expand(NUM_MIXED_TOKENS)))
    is_large_T = torch.arange(num_tokens) % TOKENS_PER_EXPERT < TOKENS_PER_EXPERT // 2
    x_TH = x_TH * (size_T * torch.where(is_large_T, LARGE, SMALL))[:, None]
    device = topology.device
    return x_TH.to(device, config.dtype), StandardTopK(weights_TK.to(device), ids_TK.to(device))


def _input_size(experts: ExpertWeights, expert: int, x_H: torch.Tensor, config: MoeRunnerConfig) -> torch.Tensor:
    """Factor that brings W13 x to about the activation's limit, judged by the first block of gate and of up rows."""
    inter = experts.intermediate_size
    if inter == 0:
        return torch.tensor(1.0)
    w13 = experts.w13.select(expert)
    parts = [w13.narrow(0, half * inter, min(BLOCK, inter)).dequantize().cpu() @ x_H for half in (0, 1)]
    typical = torch.cat(parts).square().mean().sqrt()
    return (config.activation.limit or _LIMIT_OF_PLAIN) / typical if typical > 0 else torch.tensor(1.0)


def _errors(got_TH: torch.Tensor, want_TH: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Relative errors [E + 1, B], the worst token of each expert, then of the mixed tokens. NaN counts as infinite.

    Taken per token, since the small ones would drown among the large; outputs much smaller than the token's others are
    measured against those.
    """
    whole_T1 = want_TH.square().mean(1, keepdim=True).sqrt()
    columns = []
    for difference, want in zip((got_TH - want_TH).split(BLOCK, 1), want_TH.split(BLOCK, 1), strict=True):
        error_T1 = difference.square().mean(1, keepdim=True).sqrt()
        scale_T1 = torch.maximum(want.square().mean(1, keepdim=True).sqrt(), 1e-2 * whole_T1)
        columns.append(torch.where(scale_T1 > 0, error_T1 / scale_T1, error_T1))
    error_TB = torch.cat(columns, dim=1).nan_to_num(nan=float("inf"))
    num_solo = num_experts * TOKENS_PER_EXPERT
    solo_EB = error_TB[:num_solo].unflatten(0, (num_experts, TOKENS_PER_EXPERT)).amax(1)
    return torch.cat((solo_EB, error_TB[num_solo:].amax(0, keepdim=True)))
