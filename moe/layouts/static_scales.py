"""Merges the static scales of FP8 per-tensor and NVFP4 experts to the granularity of fused kernels. Plain torch.

A fused kernel has one scale per expert for w13 and one activation scale for all experts of the layer.
Shape letters: E local experts, I intermediate, H hidden.
"""

import dataclasses

import torch

from moe.errors import WeightFormatError
from moe.formats import ExpertWeights, Fp8TensorWeight, Nvfp4Weight, Weight
from moe.formats.fp8 import to_e4m3
from moe.formats.per_tensor import spread_rows
from moe.topology import Topology


def layer_input_scales(experts: ExpertWeights, topology: Topology) -> tuple[torch.Tensor, torch.Tensor]:
    """(w13, w2) fp32 scalars: the largest activation scale over all experts of the layer, on `topology.device`.

    Raises:
        WeightFormatError: no activation scales, or only this rank's although other ranks hold experts.
    """
    device = topology.device
    if experts.layer_input_scales is not None:
        scale13, scale2 = (
            torch.tensor(value, dtype=torch.float32, device=device) for value in experts.layer_input_scales
        )
        return scale13, scale2
    if topology.ep_size > 1:
        raise WeightFormatError(
            f"{experts.format_name} with ep_size {topology.ep_size} needs ExpertWeights.layer_input_scales: "
            "one activation scale serves the experts of all ranks"
        )
    return expert_input_scales(experts.w13).max().to(device), expert_input_scales(experts.w2).max().to(device)


def with_layer_input_scales(experts: ExpertWeights, topology: Topology) -> ExpertWeights:
    """The same experts, every input scale replaced by the layer's, as a kernel with one activation scale sees them."""
    weights: list[Weight] = []
    for weight, scale in zip((experts.w13, experts.w2), layer_input_scales(experts, topology), strict=True):
        if not isinstance(weight, Fp8TensorWeight | Nvfp4Weight) or weight.input_scale is None:
            return experts
        value = scale.to(weight.input_scale.device)
        weights.append(dataclasses.replace(weight, input_scale=value.expand_as(weight.input_scale).contiguous()))
    return dataclasses.replace(experts, w13=weights[0], w2=weights[1])


def expert_input_scales(weight: Weight) -> torch.Tensor:
    """fp32 [E]: each local expert's activation scale. Gate and up have the same input, so the larger one applies."""
    scale: torch.Tensor | None = getattr(weight, "input_scale", None)
    if scale is None:
        raise WeightFormatError(f"{weight.format_name} weight without input_scale: this kernel needs a static one")
    return scale if scale.ndim == 1 else scale.amax(-1)


def one_scale_fp8(weight: Fp8TensorWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [E, N, K], fp32 [E]). If gate and up have their own scales, both are requantized to the larger (lossy)."""
    if weight.scale.ndim == 1:
        return weight.data, weight.scale
    common_E = weight.scale.amax(-1)
    ratio = spread_rows(weight.scale / common_E[:, None], weight.shape)
    return to_e4m3(weight.data.float() * ratio), common_E


def one_scale_nvfp4(weight: Nvfp4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 block scales [E, N, K/16], fp32 [E]). The halves' ratio goes into the block scales (lossy)."""
    if weight.scale_2.ndim == 1:
        return weight.scales, weight.scale_2
    common_E = weight.scale_2.amax(-1)
    ratio = spread_rows(weight.scale_2 / common_E[:, None], weight.shape)
    return to_e4m3(weight.scales.float() * ratio), common_E
