"""Reference MoE layer in fp32: the definition of correct. One expert and one matrix at a time, so slow.

It shares no code with `moe.backends`: it has its own activation, and its weights come from `dequantize`.
Shape letters: T tokens, K top-k, R rows of one expert, E local experts, H hidden, I intermediate.
"""

import torch

from moe.config import Activation
from moe.formats import ExpertWeights, Weight
from moe.formats.activation_quant import ActivationQuant
from moe.routing import StandardTopK


def reference_moe(
    x_TH: torch.Tensor,
    topk: StandardTopK,
    experts: ExpertWeights,
    activation: Activation,
    *,
    quantize_input: ActivationQuant | None = None,
    first_expert: int = 0,
) -> torch.Tensor:
    """Weighted sum over each token's local experts, fp32 [T, H].

    `experts` have the global ids from `first_expert` on. Ids of other ranks and -1 add nothing.
    `quantize_input` rounds the input of both GEMMs as the path under test does; None if that does not quantize.
    """
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for expert in range(experts.num_experts):
        rows, slots = torch.where(topk.ids == first_expert + expert)
        if rows.numel():
            y_RH = expert_reference(x_TH[rows].float(), experts, expert, activation, quantize_input)
            out_TH.index_add_(0, rows, topk.weights[rows, slots, None].float() * y_RH)
    return out_TH


def expert_reference(
    x_RH: torch.Tensor,
    experts: ExpertWeights,
    expert: int,
    activation: Activation,
    quantize_input: ActivationQuant | None = None,
) -> torch.Tensor:
    """Output of one local expert for fp32 rows, not multiplied by a routing weight: fp32 [R, H]."""
    h_RF = _multiply(x_RH, experts.w13, experts.b13, expert, quantize_input)
    gate_RI, up_RI = h_RF[:, : experts.intermediate_size], h_RF[:, experts.intermediate_size :]
    if activation.limit is not None:
        gate_RI = torch.minimum(gate_RI, torch.full_like(gate_RI, activation.limit))
        up_RI = torch.clip(up_RI, -activation.limit, activation.limit)
    a_RI = gate_RI / (1 + torch.exp(-activation.alpha * gate_RI)) * (up_RI + activation.beta)
    return _multiply(a_RI, experts.w2, experts.b2, expert, quantize_input)


def _multiply(
    x_RK: torch.Tensor,
    weights: Weight,
    bias_EN: torch.Tensor | None,
    expert: int,
    quantize_input: ActivationQuant | None,
) -> torch.Tensor:
    weight = weights.select(expert)
    if quantize_input is not None:
        x_RK = quantize_input(x_RK, weight)
    y_RN = torch.einsum("rk,nk->rn", x_RK, weight.dequantize())
    return y_RN if bias_EN is None else y_RN + bias_EN[expert].float()
