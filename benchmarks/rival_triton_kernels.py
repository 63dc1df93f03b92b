"""OpenAI's `triton_kernels` as a rival for MXFP4 GPT-OSS layers on Hopper. Not part of the service.

Needs the package on the path (it is no requirement of this project). Its matrix products take columns that alternate
gate and up, MXFP4 bytes in its Hopper layouts, fp32 biases and slots sorted by its own routing from router logits.
Shape letters: T tokens, K top-k, E experts, H hidden, I intermediate, C columns.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from moe.config import Activation
from moe.errors import UnsupportedPathError
from moe.formats import ExpertWeights, Mxfp4Weight
from moe.routing import StandardTopK

WARPS = (4, 8)  # both are in use: fewer tokens do better with 4; the layout of the scales depends on it
_UNCHOSEN = -1e4  # logit of every expert that a token does not go to


def _library(submodule: str) -> Any:
    return importlib.import_module(f"triton_kernels.{submodule}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RivalLayer:
    """Weights of one layer in the library's tensors; scales once for every number of warps."""

    w13: Any  # [E, H, 2I]
    w2: Any  # [E, I, H]
    precision_13: dict[int, Any]
    precision_2: dict[int, Any]
    b13: torch.Tensor  # fp32 [E, 2I], gate and up alternate
    b2: torch.Tensor  # fp32 [E, H]
    activation: Activation


@dataclass(frozen=True, slots=True)
class RivalRouting:
    """What its routing makes of logits: slot order, runs of experts, weights in slot order."""

    data: Any
    gather: Any
    scatter: Any


def prepare(experts: ExpertWeights, activation: Activation) -> RivalLayer:
    """Convert canonical experts once.

    Raises:
        UnsupportedPathError: not MXFP4 with biases, or an activation without limit or with another offset than 1.
    """
    w13, w2, b13, b2 = experts.w13, experts.w2, experts.b13, experts.b2
    if not isinstance(w13, Mxfp4Weight) or not isinstance(w2, Mxfp4Weight) or b13 is None or b2 is None:
        raise UnsupportedPathError("triton_kernels is compared on MXFP4 experts with biases only")
    if activation.beta != 1.0 or activation.limit is None:
        raise UnsupportedPathError(f"triton_kernels fuses GPT-OSS's activation only, not {activation}")
    value_13, precision_13 = _matrix(Mxfp4Weight(alternating(w13.codes), alternating(w13.scales)))
    value_2, precision_2 = _matrix(w2)
    return RivalLayer(
        w13=value_13, w2=value_2, precision_13=precision_13, precision_2=precision_2,
        b13=alternating(b13.float()), b2=b2.float().contiguous(), activation=activation,
    )  # fmt: skip


def alternating(gate_up_E2IC: torch.Tensor) -> torch.Tensor:
    """[E, 2I, ...] from rows [gate; up] to gate 0, up 0, gate 1, up 1, ..."""
    gate, up = gate_up_E2IC.chunk(2, dim=1)
    return torch.stack((gate, up), dim=2).flatten(1, 2).contiguous()


def _matrix(weight: Mxfp4Weight) -> tuple[Any, dict[int, Any]]:
    """Codes [E, N, K/2] and scales [E, N, K/32] as a tensor [E, K, N] and precision records by number of warps."""
    tensor, layout = _library("tensor"), _library("tensor_details.layout")
    codes_EKN, scales_EKN = weight.codes.transpose(1, 2), weight.scales.transpose(1, 2)
    value = tensor.convert_layout(
        tensor.wrap_torch_tensor(codes_EKN, dtype=tensor.FP4), layout.HopperMXValueLayout, mx_axis=1
    )
    precision = {
        warps: _library("matmul_ogs").PrecisionConfig(
            weight_scale=tensor.convert_layout(
                tensor.wrap_torch_tensor(scales_EKN), layout.HopperMXScaleLayout, mx_axis=1, num_warps=warps
            ),
        )
        for warps in WARPS
    }
    return value, precision


def logits_for(topk: StandardTopK, num_experts: int) -> torch.Tensor:
    """fp32 [T, E] that its softmax over the chosen experts turns into the same ids and weights (which sum to one)."""
    logits = torch.full((topk.ids.shape[0], num_experts), _UNCHOSEN, device=topk.ids.device)
    return logits.scatter_(1, topk.ids.long(), topk.weights.clamp_min(1e-6).log())


def route(logits_TE: torch.Tensor, top_k: int) -> RivalRouting:
    """Top-k, softmax over the chosen, and the sort by expert."""
    ogs, tensor = _library("matmul_ogs"), _library("tensor")
    chosen = _library("topk").topk(logits_TE, top_k, apply_softmax=True)
    slots = chosen.mask_metadata
    by_expert, by_token = slots.col_sorted_indx, slots.row_sorted_indx
    runs = tensor.make_ragged_tensor_metadata(slots.col_sum, by_token.shape[0])
    weights = chosen.vals.flatten()[by_expert]
    data = ogs.RoutingData(weights, runs.slice_sizes, logits_TE.shape[1], top_k, runs)
    return RivalRouting(data, ogs.GatherIndx(by_expert, by_token), ogs.ScatterIndx(by_token, by_expert))


def run(x_TH: torch.Tensor, routing: RivalRouting, layer: RivalLayer, warps: int) -> torch.Tensor:
    """Two matrix products, the activation fused into the first, then its own sum over a token's experts: [T, H]."""
    ogs, specialize = _library("matmul_ogs"), _library("specialize")
    swiglu = specialize.FnSpecs("swiglu", _library("swiglu").swiglu_fn, ("alpha", "limit"), reduction_n=2)
    activation = ogs.FusedActivation(swiglu, (layer.activation.alpha, layer.activation.limit))
    h = ogs.matmul_ogs(
        x_TH, layer.w13, layer.b13, routing.data, gather_indx=routing.gather,
        precision_config=layer.precision_13[warps], fused_activation=activation,
    )  # fmt: skip
    out: torch.Tensor = ogs.matmul_ogs(
        h, layer.w2, layer.b2, routing.data, scatter_indx=routing.scatter,
        precision_config=layer.precision_2[warps], gammas=routing.data.gate_scal,
    )  # fmt: skip
    return out
