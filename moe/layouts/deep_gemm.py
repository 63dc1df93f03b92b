"""DeepGEMM's layout of scales: M-major fp32 on SM90, M-major packed exponents on SM100. Plain torch, no library.

Shape letters: E experts (or any leading group), M rows, G groups of 128 columns, N weight rows, K columns.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from moe.activations import gated_activation
from moe.config import Activation
from moe.formats import Fp8BlockWeight, Weight
from moe.formats.fp8 import to_e4m3
from moe.formats.fp8_block import BLOCK
from moe.formats.token_groups import (
    dequantize_token_groups,
    pack_ue8m0,
    quantize_token_groups,
    round_up_to_power_of_two,
)

PITCH = 4  # elements: TMA needs columns to start on multiples of 16 bytes


def m_major(scale_EMG: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous along M, with columns M rounded up to 4 apart and no gap between experts.

    Returned unchanged if the strides match already. The library accepts no others.
    """
    *lead, num_rows, num_groups = scale_EMG.shape
    pitch = -(-num_rows // PITCH) * PITCH
    if scale_EMG.stride()[-2:] == (1, pitch) and (not lead or scale_EMG.stride(-3) == pitch * num_groups):
        return scale_EMG
    storage = scale_EMG.new_zeros((*lead, num_groups, pitch))
    view = storage[..., :num_rows].transpose(-1, -2)
    view.copy_(scale_EMG)
    return view


def activation_scales(scale_EMG: torch.Tensor, *, ue8m0: bool) -> torch.Tensor:
    """Scales of tokens in the kernel's layout; packed scales stay packed."""
    if ue8m0 and scale_EMG.dtype == torch.float32:
        scale_EMG = pack_ue8m0(scale_EMG)
    return m_major(scale_EMG)


@dataclass(frozen=True, slots=True)
class Ue8m0BlockWeight(Fp8BlockWeight):
    """FP8 blocks whose scales are powers of two. Kernels that need these also use such scales for activations."""


def power_of_two_weight(weight: Fp8BlockWeight) -> Ue8m0BlockWeight:
    """Round the block scales up to powers of two and requantize the codes (lossy)."""
    scale_inv = round_up_to_power_of_two(weight.scale_inv)
    ratio = (weight.scale_inv / scale_inv).repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    num_rows, num_cols = weight.shape[-2:]
    return Ue8m0BlockWeight(to_e4m3(weight.data.float() * ratio[..., :num_rows, :num_cols]), scale_inv)


def rounded_activations(x_TK: torch.Tensor, weight: Weight) -> torch.Tensor:
    """The path's quantization of the input of a GEMM with `weight`, as an fp32 round trip."""
    return dequantize_token_groups(*quantize_token_groups(x_TK, ue8m0=isinstance(weight, Ue8m0BlockWeight)))


def weight_scales(weight: Fp8BlockWeight, *, ue8m0: bool) -> torch.Tensor:
    """SM90: fp32 [E, N/128, K/128] as loaded. SM100: one packed row of exponents per weight row, [E, N, K/512]."""
    if not ue8m0:
        return weight.scale_inv.contiguous()
    return m_major(pack_ue8m0(weight.scale_inv.repeat_interleave(BLOCK, -2)))


class Swiglu(Protocol):
    """Gated activation between the GEMMs, for the rows that hold tokens, quantized to FP8."""

    def __call__(
        self, h_EMF: torch.Tensor, counts_E: torch.Tensor, activation: Activation, *, ue8m0: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """bf16 [E, M, 2I] as [gate, up] to e4m3 [E, M, I] and scales in the kernel's form; garbage past the counts."""


def swiglu_reference(
    h_EMF: torch.Tensor, counts_E: torch.Tensor, activation: Activation, *, ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Swiglu` in plain torch, one expert at a time; reads the counts on the host."""
    num_experts, num_rows, num_both = h_EMF.shape
    q_EMI = torch.zeros((num_experts, num_rows, num_both // 2), dtype=torch.float8_e4m3fn, device=h_EMF.device)
    scale_EMG = torch.zeros((num_experts, num_rows, num_both // 2 // BLOCK), device=h_EMF.device)
    for expert, count in enumerate(counts_E.tolist()):
        gate, up = h_EMF[expert, :count].float().chunk(2, dim=-1)
        codes, scales = quantize_token_groups(gated_activation(gate, up, activation), ue8m0=ue8m0)
        q_EMI[expert, :count], scale_EMG[expert, :count] = codes, scales
    return q_EMI, activation_scales(scale_EMG, ue8m0=ue8m0)
