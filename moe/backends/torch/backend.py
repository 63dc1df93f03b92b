"""Experts in plain torch on any device and in every format: the default on CPUs and the fallback everywhere.

Weights are dequantized once at load if they fit the memory budget, else one matrix of one active expert at a time.
In fp32 on a CPU, with weights that `moe.cpu.linear` packs (all MXFP4, most bf16), the bits of a token's result do not
depend on the other tokens of its batch. Elsewhere the last bits may differ.
Shape letters: T tokens, K top-k, V slots of [T, K] whose expert is on this rank, E local experts, H hidden,
I intermediate, F = 2I.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import split_with_sizes  # `Tensor.split` does the same after checks in Python

from moe.activations import gated_activation
from moe.backend import Backend, FormatSupport, refuse_overlap
from moe.config import DispatchFormat, MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.cpu.linear import DenseLinear, Linear, make_linear
from moe.cpu.memory import free_bytes
from moe.device import Device, as_dtype
from moe.formats import ExpertWeights, Weight
from moe.registry import register_backend, register_pre_permute, register_runner_core
from moe.topology import Topology
from moe.types import RunState, StandardDispatchOutput

NAME = MoeBackend.TORCH
FORMATS = ("bf16", "fp8_block", "fp8_tensor", "mxfp4", "nvfp4")
_PART_FOR_EXPERTS = 3 / 4  # of the free memory; head, KV cache and activations come later
FP32_TOLERANCE = 1e-5  # fp32 sums in another order than the reference; half precision also rounds between the steps


@dataclass(frozen=True, slots=True)
class LazyLinears:
    """Canonical weights of all experts; `linears[expert]` dequantizes one matrix each time."""

    weight: Weight
    bias_EN: torch.Tensor | None
    dtype: torch.dtype

    def __getitem__(self, expert: int) -> Linear:
        """The linear of one local expert."""
        bias_N = None if self.bias_EN is None else self.bias_EN[expert]
        return DenseLinear(self.weight.select(expert).dequantize(self.dtype), bias_N)

    def parts(self, expert: int) -> list[torch.Tensor]:
        """Stored data, scales and bias of one local expert, as views."""
        stored: Any = self.weight.select(expert)
        parts = [getattr(stored, field.name) for field in fields(stored)]
        if self.bias_EN is not None:
            parts.append(self.bias_EN[expert])
        return [part for part in parts if isinstance(part, torch.Tensor)]


Linears = list[Linear] | LazyLinears


@dataclass(frozen=True, slots=True)
class TorchMoeQuantInfo:
    """Processed weights of one layer: a linear per expert for [gate; up] and one for down.

    `put_expert` replaces them.
    """

    w13: Linears
    w2: Linears
    topology: Topology
    expert_ids: range


@dataclass(frozen=True, slots=True)
class TorchCoreInput:
    """Tokens [T, H], local expert ids [T, K] with -1 for "not here", fp32 weights [T, K]."""

    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor


@register_backend
class TorchBackend(Backend[TorchMoeQuantInfo]):
    """Runs on every device, but slowly on GPUs."""

    name = NAME
    auto_order = 90
    hardware = "any CPU or GPU"
    formats = MappingProxyType(dict.fromkeys(FORMATS, FormatSupport(takes_biases=True, activations=None)))
    transports = (MoeA2ABackend.NONE, MoeA2ABackend.DEEPEP, MoeA2ABackend.MOONCAKE, MoeA2ABackend.NIXL)
    dtypes = None
    can_move_experts = True

    def format_support(self, format_name: str, config: MoeRunnerConfig) -> FormatSupport | None:
        """In fp32 the tolerance is much lower."""
        support = super().format_support(format_name, config)
        if support is None or config.dtype != torch.float32:
            return support
        return replace(support, tolerance=FP32_TOLERANCE)

    def layer_bytes(self, format_name: str, config: MoeRunnerConfig, device: Device) -> int:
        """Size of the dequantized weights. If they do not fit, `prepare` keeps the stored form, which is smaller."""
        del format_name, device
        num_weights = 3 * config.hidden_size * config.intermediate_size
        num_biases = 2 * config.intermediate_size + config.hidden_size if config.has_biases else 0
        return config.num_local_experts * (num_weights + num_biases) * config.dtype.itemsize

    def lay_out(self, experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> TorchMoeQuantInfo:
        """Dequantize to `config.dtype` if there is memory for all layers that are left, this one included.

        So the first layers stay as they are stored where memory is short. Biases are cast.
        """
        num_weights = 3 * experts.num_experts * experts.hidden_size * experts.intermediate_size
        needed_bytes = config.num_layers_left * num_weights * config.dtype.itemsize
        fits = needed_bytes <= _PART_FOR_EXPERTS * _free_bytes(topology.device)
        b2 = experts.b2 if topology.tp_rank == 0 else None  # one rank of the sum carries the bias
        return TorchMoeQuantInfo(
            w13=_linears(experts.w13, experts.b13, config.dtype, fits),
            w2=_linears(experts.w2, b2, config.dtype, fits),
            topology=topology,
            expert_ids=topology.expert_range(config.num_experts),
        )

    def expert_parts(self, quant_info: TorchMoeQuantInfo, expert: int) -> list[torch.Tensor]:
        """Weights in the form they are kept in; CPU weights that are packed are unpacked."""
        return [part for linears in (quant_info.w13, quant_info.w2) for part in _parts_of(linears, expert)]

    def put_expert(self, quant_info: TorchMoeQuantInfo, expert: int, parts: Sequence[torch.Tensor]) -> None:
        """Make the linears anew, or overwrite the stored form."""
        rest = list(parts)
        for linears in (quant_info.w13, quant_info.w2):
            old = _parts_of(linears, expert)
            own, rest = rest[: len(old)], rest[len(old) :]
            if isinstance(linears, LazyLinears):
                for kept, part in zip(old, own, strict=True):
                    kept.copy_(part)
            else:
                linears[expert] = make_linear(own[0].clone(), own[1].clone() if len(own) > 1 else None)


def _parts_of(linears: Linears, expert: int) -> list[torch.Tensor]:
    return linears.parts(expert) if isinstance(linears, LazyLinears) else linears[expert].parts()


def _linears(weight: Weight, bias_EN: torch.Tensor | None, dtype: torch.dtype, fits: bool) -> Linears:
    lazy = LazyLinears(weight, None if bias_EN is None else bias_EN.to(dtype), dtype)
    if not fits:
        return lazy
    biases = [None] * weight.shape[0] if lazy.bias_EN is None else list(lazy.bias_EN)
    return [make_linear(weight.select(e).dequantize(dtype), bias_N) for e, bias_N in enumerate(biases)]


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_bytes()


@register_runner_core(NAME)
class TorchRunnerCore:
    """One GEMM per active expert and matrix; activation and sum for all slots at once."""

    def __init__(self, config: MoeRunnerConfig) -> None:
        self.config = config

    def run(self, core_input: TorchCoreInput, quant_info: TorchMoeQuantInfo, state: RunState) -> torch.Tensor:
        """Weighted sum over each token's local experts, [T, H]; a slot with id -1 adds exactly zero."""
        refuse_overlap(state, NAME)
        dtype = self.config.dtype
        x_TH = as_dtype(core_input.x_TH, dtype)
        slots_of = _slots_of_experts(core_input.ids_TK)
        if not slots_of:
            return torch.zeros_like(x_TH)
        slots = [slot for of_expert in slots_of.values() for slot in of_expert]
        num_rows = [len(of_expert) for of_expert in slots_of.values()]
        x_VH = _rows_of_slots(x_TH, slots, core_input.ids_TK.shape[1])
        w13, w2 = quant_info.w13, quant_info.w2
        h_VF = torch.cat([w13[e](x_RH) for e, x_RH in zip(slots_of, split_with_sizes(x_VH, num_rows), strict=True)])
        # In bf16 every operation of the activation would round.
        gate_VI, up_VI = as_dtype(h_VF, torch.float32).chunk(2, dim=-1)
        a_VI = as_dtype(gated_activation(gate_VI, up_VI, self.config.activation), dtype)
        y_VH = torch.cat([w2[e](a_RI) for e, a_RI in zip(slots_of, split_with_sizes(a_VI, num_rows), strict=True)])
        return as_dtype(_weighted_sum(as_dtype(y_VH, torch.float32), slots, core_input), dtype)


def _slots_of_experts(ids_TK: torch.Tensor) -> dict[int, list[int]]:
    """The slots of every active expert, as indices into the flattened [T, K]."""
    slots_of: dict[int, list[int]] = {}
    for slot, expert in enumerate(ids_TK.flatten().tolist()):
        if expert >= 0:
            slots_of.setdefault(expert, []).append(slot)
    return slots_of


def _rows_of_slots(x_TH: torch.Tensor, slots: list[int], top_k: int) -> torch.Tensor:
    if x_TH.shape[0] == 1:
        return x_TH.expand(len(slots), -1)
    return x_TH.index_select(0, _indices([slot // top_k for slot in slots], x_TH.device))


def _indices(numbers: list[int], device: torch.device) -> torch.Tensor:
    """int64; by way of numpy, which takes a third of the time of `torch.tensor`."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64)).to(device)


def _weighted_sum(y_VH: torch.Tensor, slots: list[int], core_input: TorchCoreInput) -> torch.Tensor:
    """[T, H] in fp32. Slots without a local expert add zeros, whatever their weight is."""
    weights_TK = core_input.weights_TK
    num_tokens, top_k = weights_TK.shape
    num_rows, num_slots = len(slots), num_tokens * top_k
    if num_rows < num_slots:
        y_VH = torch.cat((y_VH, y_VH.new_zeros(1, y_VH.shape[1])))
        weights_TK = weights_TK.masked_fill(core_input.ids_TK < 0, 0.0)
    if slots != list(range(num_slots)):  # always equal for one token whose experts are all here
        row_of_slot = [num_rows] * num_slots
        for row, slot in enumerate(slots):
            row_of_slot[slot] = row
        y_VH = y_VH.index_select(0, _indices(row_of_slot, y_VH.device))
    return torch.bmm(weights_TK.unsqueeze(1), y_VH.view(num_tokens, top_k, -1)).squeeze(1)


@register_pre_permute(DispatchFormat.STANDARD, NAME)
def standard_to_torch(
    dispatched: StandardDispatchOutput, quant_info: TorchMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> TorchCoreInput:
    """Global expert ids to local ones; ids of other ranks become -1."""
    del config, state
    topk = dispatched.topk_output.to_standard()
    ids_TK = topk.ids
    if quant_info.topology.ep_size > 1:
        first, last = quant_info.expert_ids[0], quant_info.expert_ids[-1]
        is_local = (ids_TK >= first) & (ids_TK <= last)
        ids_TK = torch.where(is_local, ids_TK - first, -1)
    return TorchCoreInput(dispatched.hidden_states, ids_TK, topk.weights)
