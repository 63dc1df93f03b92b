"""Hostile experts and tokens for every path, and the reference they are compared with.

Gate unlike up; per-expert magnitudes, biases and scales all distinct; many clamped activations; one idle expert;
-1 ids; router weights with the scaling factor in. The reference is the twin with the path's activation rounding.
"""

import dataclasses
import functools
import math
from typing import Any

import torch

from moe import Activation, MoeRunnerConfig, StandardTopK
from moe.check.reference import reference_moe
from moe.formats import ExpertWeights, Fp8TensorWeight, Nvfp4Weight, activation_quant
from tests.moe.configs import rank_config
from tests.moe.joining import concat_rows
from tests.moe.moe_layers import FORMATS, relative_error

__all__ = ["relative_error"]  # used as hostile.relative_error
FACTOR = 2.5
ROUNDING = {
    "fp8_block": activation_quant.fp8_groups,
    "fp8_tensor": activation_quant.fp8_static,
    "nvfp4": activation_quant.nvfp4_static,
}


@functools.cache
def _drawn_experts(num_experts: int, hidden: int, inter: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers for `dense_experts`, which many tests ask for in the same sizes."""
    g = torch.Generator().manual_seed(seed)
    gate = torch.randn(num_experts, inter, hidden, generator=g) * 1.5 / hidden**0.5
    up = (torch.randn(num_experts, inter, hidden, generator=g) + 0.02) * 0.6 / hidden**0.5
    w2 = torch.randn(num_experts, hidden, inter, generator=g) / max(inter, 1) ** 0.5
    return torch.cat((gate, up), dim=1), w2


def dense_experts(num_experts: int, hidden: int, inter: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(w13 [E, 2I, H] with rows [gate; up], w2 [E, H, I]) in fp32."""
    w13, w2 = _drawn_experts(num_experts, hidden, inter, seed)
    size = 1 + 0.35 * torch.arange(num_experts)[:, None, None]
    return w13 * size, w2 * size.flip(0)


def plain_experts(
    name: str, num_experts: int, hidden: int, inter: int, *, has_biases: bool = False, size: float = 1.0
) -> ExpertWeights:
    """Experts of any format, without activation scales; `size` multiplies w13, so that more values are clamped."""
    w13, w2 = dense_experts(num_experts, hidden, inter)
    b13, b2 = biases(num_experts, hidden, inter) if has_biases else (None, None)
    kind = FORMATS[name]
    return ExpertWeights(w13=kind.quantize(size * w13), w2=kind.quantize(w2), b13=b13, b2=b2)


def biases(num_experts: int, hidden: int, inter: int, *, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """(b13 [E, 2I], b2 [E, H]) in bf16."""
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_experts, 2 * inter, generator=g).bfloat16(),
        torch.randn(num_experts, hidden, generator=g).bfloat16(),
    )


def tokens(num_tokens: int, hidden: int, *, seed: int = 1, size: float = 2.0) -> torch.Tensor:
    """bf16 [T, H]."""
    return (torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(seed)) * size).bfloat16()


def routing(num_tokens: int, num_experts: int, top_k: int, *, seed: int = 2, idle: int = 1) -> StandardTopK:
    """Distinct ids per token, expert `idle` never chosen, some slots -1, weights that sum to FACTOR and fit bf16."""
    g = torch.Generator().manual_seed(seed)
    usable = torch.tensor([expert for expert in range(num_experts) if expert != idle])
    order = torch.rand(num_tokens, len(usable), generator=g).argsort(-1)
    ids = usable[order[:, :top_k]].int()
    weights = torch.softmax(torch.randn(num_tokens, top_k, generator=g), -1) * FACTOR
    if num_tokens > 2:
        ids[1, top_k - 1] = -1
        ids[2] = -1
    return StandardTopK(weights.bfloat16().float(), ids)


def reference(x: torch.Tensor, topk: StandardTopK, experts: ExpertWeights, activation: Activation) -> torch.Tensor:
    """fp32 [T, H] of the twin; asserts that clamps, where there are any, act on at least a tenth of the values."""
    if activation.limit is not None:
        hidden = torch.einsum("th,efh->etf", x.float(), experts.w13.dequantize())
        gate, up = hidden.chunk(2, dim=-1)
        clamped = ((gate > activation.limit).float().mean() + (up.abs() > activation.limit).float().mean()) / 2
        assert clamped > 0.1
    rounding = ROUNDING.get(experts.format_name)
    return reference_moe(x, topk, experts, activation, quantize_input=rounding)


def layer_wide(experts: ExpertWeights, *, w13: bool = True, w2: bool = True) -> ExpertWeights:
    """The same experts, all with the largest activation scale of the layer, as kernels with one scale see them."""

    def widen(weight: Any) -> Any:
        if getattr(weight, "input_scale", None) is None:
            return weight
        largest = torch.full_like(weight.input_scale, float(weight.input_scale.max()))
        return dataclasses.replace(weight, input_scale=largest)

    return dataclasses.replace(
        experts, w13=widen(experts.w13) if w13 else experts.w13, w2=widen(experts.w2) if w2 else experts.w2
    )


def make_config(num_experts: int, hidden: int, inter: int, top_k: int = 2, **changes: object) -> MoeRunnerConfig:
    sizes = {"num_experts": num_experts, "hidden_size": hidden, "intermediate_size": inter, "top_k": top_k}
    return rank_config(**(sizes | changes))  # type: ignore[arg-type]


def shard(
    experts: ExpertWeights, *, tp: tuple[int, int] = (1, 0), ep: tuple[int, int] = (1, 0), block: int = 32
) -> ExpertWeights:
    """This rank's part: whole experts by (ep size, rank), then blocks of the intermediate axis by (tp size, rank)."""
    num_local = experts.num_experts // ep[0]
    first = ep[1] * num_local
    inter = experts.intermediate_size
    num_blocks = -(-inter // block)
    share = -(-num_blocks // tp[0])
    start, end = min(num_blocks, tp[1] * share) * block, min(num_blocks, (tp[1] + 1) * share) * block
    gate = experts.w13.narrow(0, first, num_local).narrow(1, start, end - start)
    up = experts.w13.narrow(0, first, num_local).narrow(1, inter + start, end - start)
    w2, b13, b2 = experts.w2.narrow(0, first, num_local).narrow(2, start, end - start), experts.b13, experts.b2
    if b13 is not None and b2 is not None:
        halves = b13[first : first + num_local].unflatten(1, (2, inter))
        b13, b2 = halves[:, :, start:end].flatten(1), b2[first : first + num_local]
    return ExpertWeights(w13=joined(gate, up), w2=w2, b13=b13, b2=b2)


def joined(gate: Any, up: Any) -> Any:
    """Join two shards of one format along N: matrices end to end, one scale per matrix stays one."""
    fields = {}
    for field in dataclasses.fields(gate):
        first, second = getattr(gate, field.name), getattr(up, field.name)
        is_matrix = first is not None and first.dim() == 3
        fields[field.name] = torch.cat((first, second), dim=1) if is_matrix else first
    return type(gate)(**fields)


def quantized_experts(
    name: str, num_experts: int, hidden: int, inter: int, *, x: torch.Tensor, per_half: bool = False
) -> ExpertWeights:
    """bf16, fp8_block, fp8_tensor or nvfp4 experts; static input scales fit `x` and differ by expert."""
    if name in ("bf16", "fp8_block"):
        return plain_experts(name, num_experts, hidden, inter)
    w13, w2 = dense_experts(num_experts, hidden, inter)
    top = 448.0 if name == "fp8_tensor" else 6 * 448.0
    # powers of two: both sides then divide exactly, and no value near a tie rounds differently
    steps = torch.exp2(-(torch.arange(num_experts) % 3).float())
    in13 = 2.0 ** math.ceil(math.log2(float(x.abs().max()) / top)) * steps
    in2 = 2.0 ** math.ceil(math.log2(40.0 / top)) * steps.roll(1)
    kind = Fp8TensorWeight if name == "fp8_tensor" else Nvfp4Weight
    if not per_half:
        return ExpertWeights(w13=kind.quantize(w13, in13), w2=kind.quantize(w2, in2))
    gate, up = w13.chunk(2, dim=1)
    upper, lower = kind.quantize(gate, in13), kind.quantize(up, in13 * 0.5)
    # half the scale: bringing both halves to one scale then loses nothing but subnormals
    halved = {name: getattr(upper, name) * 0.5 for name in ("scale", "scale_2") if hasattr(upper, name)}
    halves = concat_rows(upper, dataclasses.replace(lower, **halved))
    return ExpertWeights(w13=halves, w2=kind.quantize(w2, in2))


def with_layer_scales(part: ExpertWeights, whole: ExpertWeights) -> ExpertWeights:
    """A rank's experts that know the activation scales of the whole layer."""
    scales = [getattr(weight, "input_scale", None) for weight in (whole.w13, whole.w2)]
    if scales[0] is None or scales[1] is None:
        return part
    return dataclasses.replace(part, layer_input_scales=(float(scales[0].max()), float(scales[1].max())))


def lost_expert(experts: ExpertWeights) -> ExpertWeights:
    """Expert 2 has the second matrix of expert 1."""
    index = torch.tensor([0, 1, 1, *range(3, experts.num_experts)])
    w2: Any = experts.w2
    fields = {field.name: getattr(w2, field.name) for field in dataclasses.fields(w2)}
    kept = {name: value[index] if torch.is_tensor(value) else value for name, value in fields.items()}
    return dataclasses.replace(experts, w2=type(w2)(**kept))
