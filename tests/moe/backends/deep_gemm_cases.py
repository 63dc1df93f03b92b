"""What the DeepGEMM tests share: the twin, and runs behind DeepEP."""

from typing import Any

import torch

from moe import Activation, MoeA2ABackend, MoeBackend
from moe.backends.deep_gemm.backend import DeepGemmBackend
from moe.check.reference import reference_moe
from moe.config import DispatchDtype
from moe.dispatch.deepep_settings import DeepepMode
from moe.formats import ExpertWeights, Fp8BlockWeight, Weight, activation_quant
from tests.moe.backends import hostile
from tests.moe.dispatch import several_ranks
from tests.moe.moe_layers import DEEPSEEK_V4

H, I, LL_H = 256, 128, 2048
# Both sides round activations alike, but fp32 sums in another order may put a value on the other side of a tie: an E4M3
# code more or less gave few tokens an error of 1.8e-3 on a CPU without AVX-512. A fault gives 2e-2 and more.
QUANTIZED = 4e-3
BACKEND = DeepGemmBackend()


def power_of_two(experts: ExpertWeights) -> ExpertWeights:
    """What SM100 computes with, rounded here once more and by another formula."""

    def convert(weight: Weight) -> Fp8BlockWeight:
        assert isinstance(weight, Fp8BlockWeight)
        scale = torch.exp2(torch.ceil(torch.log2(weight.scale_inv)))
        spread = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        return Fp8BlockWeight((weight.dequantize() / spread).clamp(-448, 448).to(torch.float8_e4m3fn), scale)

    return ExpertWeights(w13=convert(experts.w13), w2=convert(experts.w2))


def power_of_two_groups(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    del weight
    groups = x.float().unflatten(-1, (-1, 128))
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448)))
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def twin(x: torch.Tensor, topk: Any, experts: ExpertWeights, arch: str, activation: Activation) -> torch.Tensor:
    if arch == "sm100":
        return reference_moe(x, topk, power_of_two(experts), activation, quantize_input=power_of_two_groups)
    return reference_moe(x, topk, experts, activation, quantize_input=activation_quant.fp8_groups)


def run_deepep(mode: DeepepMode, arch: str, num_tokens: list[int]) -> float:
    hidden = LL_H if mode is DeepepMode.LOW_LATENCY else H
    experts = hostile.plain_experts("fp8_block", several_ranks.E, hidden, I)
    inputs = several_ranks.rank_inputs(num_tokens, hidden, torch.bfloat16)
    dispatch_dtype = DispatchDtype.FP8_UE8M0 if arch == "sm100" else DispatchDtype.FP8
    outputs = several_ranks.run_layer(
        experts, inputs, backend=MoeBackend.DEEP_GEMM, a2a=MoeA2ABackend.DEEPEP, formats=mode.dispatch_formats,
        dispatcher_for=lambda rank, config: several_ranks.deepep(
            rank, mode, hidden, dispatch_dtype, expert_alignment=BACKEND.expert_alignment
        ),
        dtype=torch.bfloat16, activation=DEEPSEEK_V4,
    )  # fmt: skip
    return several_ranks.worst_error(outputs, inputs, lambda x, topk: twin(x, topk, experts, arch, DEEPSEEK_V4))
