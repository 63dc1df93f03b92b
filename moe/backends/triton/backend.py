"""Our own Triton kernels as a backend: bf16, FP8 block, MXFP4 and NVFP4 experts with bf16 activations on CUDA GPUs.

One weight layout serves every token count; `plans.py` chooses the launch plan. Triton is imported on first use.
Shape letters: T tokens, K top-k, H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from moe.backend import Backend, CheckCase, FormatSupport, Tactic, TacticTable, refuse_overlap
from moe.backends.c_compiler import missing_for_triton
from moe.backends.triton.plans import LayerShape, PlanTable, plans_for
from moe.backends.triton.tactics import proposals, table_of
from moe.config import DispatchFormat, MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.device import Device, arch_of, cuda_arch
from moe.errors import UnsupportedPathError
from moe.formats import ExpertWeights
from moe.formats.activation_quant import fp8_groups
from moe.kernels.layout import pack_matrix, packed_bytes
from moe.kernels.plan import Plan
from moe.layouts.expert_slots import masked_rows
from moe.registry import register_backend, register_fused_func
from moe.topology import Topology
from moe.types import (
    DeepepLlDispatchOutput,
    DeepepNormalDispatchOutput,
    RowsCombineInput,
    RunState,
    StandardCombineInput,
    StandardDispatchOutput,
)

if TYPE_CHECKING:
    from moe.kernels.launch import Layer

NAME = MoeBackend.TRITON
FORMATS = ("bf16", "fp8_block", "mxfp4", "nvfp4")
_OLDEST_ARCH = 80  # the first with bf16 tensor cores
_OLDEST_PDL_MAJOR = 9  # the first with programmatic dependent launch (PDL)
# bf16 between the GEMMs moves some activations to the next FP8 step, as in other FP8 kernels
_FP8_TOLERANCE = 8e-2


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonMoeQuantInfo:
    """Processed weights of one layer and the plans that read them."""

    layer: "Layer"
    plans: PlanTable
    topology: Topology


@register_backend
class TritonBackend(Backend[TritonMoeQuantInfo]):
    """Weights in any of four formats times bf16 activations, accumulated in fp32, summed without atomics."""

    name = NAME
    auto_order = 80
    package = "triton"
    hardware = "CUDA GPUs from sm80"
    formats = MappingProxyType(dict.fromkeys(FORMATS, FormatSupport(takes_biases=True, activations=None)))
    transports = (MoeA2ABackend.NONE, MoeA2ABackend.DEEPEP)
    tunable_with = transports
    compiles_tactics = True
    is_capturable = True
    can_move_experts = True

    def lacks(self) -> str | None:
        """Also the C compiler for Triton's launcher, which is built when the first kernel runs."""
        return self.missing_package() or missing_for_triton()

    def unsupported_arch(self, arch: str, format_name: str, support: FormatSupport) -> str | None:
        """Any CUDA GPU with bf16 tensor cores."""
        del format_name, support
        if not Device(arch=arch).is_cuda:
            return f"device {arch} is not supported; it runs on {self.hardware}"
        if int(arch.removeprefix("sm").rstrip("af")) < _OLDEST_ARCH:
            return f"{arch} has no bf16 tensor cores; it runs on {self.hardware}"
        return None

    def arch_of(self, device: torch.device) -> str | None:
        """None for a CPU, where Triton's interpreter runs the kernels."""
        return cuda_arch(device) if device.type == "cuda" else None

    def layer_bytes(self, format_name: str, config: MoeRunnerConfig, device: Device) -> int:
        """Bytes of the packed blocks, including padding."""
        del device
        hidden, inter = config.hidden_size, config.intermediate_size
        w13 = packed_bytes(format_name, 2 * inter, hidden, is_gated=True, has_bias=config.has_biases)
        w2 = packed_bytes(format_name, hidden, inter, is_gated=False, has_bias=config.has_biases)
        return config.num_local_experts * (w13 + w2)

    def lay_out(self, experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> TritonMoeQuantInfo:
        """Pack on `topology.device` and look the plans up."""
        from moe.kernels.arrivals import counters
        from moe.kernels.launch import Layer

        device = topology.device
        b13, b2 = (None if bias is None else bias.to(device) for bias in (experts.b13, experts.b2))
        local = topology.expert_range(config.num_experts)
        w13 = pack_matrix(experts.w13.to(device), b13, is_gated=True)
        layer = Layer(
            w13=w13,
            w2=pack_matrix(experts.w2.to(device), b2, is_gated=False),
            first_expert=local.start,
            num_experts=len(local),
            top_k=config.top_k,
            activation=config.activation,
            adds_bias_2=topology.tp_rank == 0,  # one rank of the sum carries the bias
            arrived=counters(w13.data.device, "experts"),  # made before any step is captured
        )
        shape = LayerShape(
            arch=arch_of(device),
            format_name=experts.format_name,
            num_experts=config.num_experts,
            top_k=config.top_k,
            hidden_size=experts.hidden_size,
            intermediate_size=experts.intermediate_size,
        )
        return TritonMoeQuantInfo(layer=layer, plans=plans_for(shape), topology=topology)

    def check_cases(
        self,
        quant_info: TritonMoeQuantInfo,
        format_name: str,
        config: MoeRunnerConfig,
        dispatch_format: DispatchFormat,
    ) -> Sequence[CheckCase]:
        """One case per compiled kernel: each plan, and two for a direct plan: its code differs above `block_m` tokens.

        Direct plans never run masked rows.
        """
        bounds: dict[tuple[Plan, bool], int | None] = {}
        before = 0
        for bound, plan in quant_info.plans.steps:
            ends = [bound]
            if plan.is_direct and bound is not None and before < plan.block_m < bound:
                ends = [plan.block_m, bound]
            for end in ends:
                key = plan, plan.is_direct and end is not None and end <= plan.block_m
                bounds.pop(key, None)  # of equal plans the last counts
                bounds[key] = end
            before = bound or before
        support = self.known_format(format_name, config)
        may_be_direct = dispatch_format is not DispatchFormat.DEEPEP_LL
        return [
            _check_case(quant_info, plan, bound, support.tolerance)
            for (plan, _), bound in bounds.items()
            if may_be_direct or not plan.is_direct
        ]

    def expert_stacks(self, quant_info: TritonMoeQuantInfo) -> Sequence[torch.Tensor]:
        """Blocks, scales and factors of both matrices. An expert's factor goes with it: ranks scale differently."""
        return [
            stack
            for matrix in (quant_info.layer.w13, quant_info.layer.w2)
            for stack in (matrix.data, matrix.scales, matrix.tail, matrix.post, matrix.bias)
            if stack is not None
        ]

    def tactics(
        self, quant_info: TritonMoeQuantInfo, config: MoeRunnerConfig, num_tokens: int, measured: Mapping[Tactic, float]
    ) -> Sequence[Tactic]:
        """Launch plans as text."""
        device = quant_info.topology.device
        has_pdl = device.type == "cuda" and int(cuda_arch(device)[2:-1]) >= _OLDEST_PDL_MAJOR
        untuned = quant_info.plans.pick(num_tokens)
        return proposals(untuned, num_tokens, config.num_experts, config.top_k, measured, has_pdl=has_pdl)

    def with_choice(self, quant_info: TritonMoeQuantInfo, choice: TacticTable) -> TritonMoeQuantInfo:
        """The same layer with a plan table made of the choice."""
        return replace(quant_info, plans=table_of(choice, quant_info.plans, quant_info.layer.top_k))


def _check_case(quant_info: TritonMoeQuantInfo, plan: Plan, bound: int | None, tolerance: float) -> CheckCase:
    """The case of one plan. Rows at one expert: a tile (two if the plan is direct), and part of half a tile."""
    steps = ((bound, plan), quant_info.plans.steps[-1]) if plan.is_direct else ((None, plan),)
    kind = "direct" if plan.is_direct else "grouped"
    precision = "FP8 activations, " if plan.fp8_activations else ""
    number = "any number of" if bound is None else f"up to {bound}"
    return CheckCase(
        quant_info=replace(quant_info, plans=PlanTable(steps)),
        quantize_input=fp8_groups if plan.fp8_activations else None,
        tolerance=_FP8_TOLERANCE if plan.fp8_activations else tolerance,
        max_tokens=bound,
        rows_at_one_expert=(2 * plan.block_m if plan.is_direct else plan.block_m, 3 * plan.block_m // 8),
        name=f"{kind} plan {plan.block_m} x {plan.block_n_1} ({precision}{number} tokens)",
    )


@register_fused_func(MoeA2ABackend.NONE, NAME)
def run_standard(
    dispatched: StandardDispatchOutput, quant_info: TritonMoeQuantInfo, config: MoeRunnerConfig, state: RunState
) -> StandardCombineInput:
    """Standard layout in and out; partial when other ranks hold the rest of the sum."""
    refuse_overlap(state, NAME)
    topk = dispatched.topk_output.to_standard()
    x_TH, layer = dispatched.hidden_states, quant_info.layer
    out_TH = _run(x_TH, topk.ids, topk.weights, layer, quant_info.plans.pick(x_TH.shape[0]), config, quant_info)
    return dispatched.result(out_TH, quant_info.topology.is_partial)


@register_fused_func(MoeA2ABackend.DEEPEP, NAME)
def run_deepep(
    dispatched: DeepepNormalDispatchOutput | DeepepLlDispatchOutput,
    quant_info: TritonMoeQuantInfo,
    config: MoeRunnerConfig,
    state: RunState,
) -> RowsCombineInput:
    """Received bf16 rows of either mode.

    In normal mode, rows without a local expert give zeros. In low latency, rows past an expert's count may hold
    anything, and the result has the strides of the received rows.

    Raises:
        UnsupportedPathError: the transport has quantized the rows.
    """
    refuse_overlap(state, NAME)
    if dispatched.hidden_states_scale is not None:
        raise UnsupportedPathError("--moe-backend triton takes bf16 rows: do not let DeepEP dispatch FP8")
    x, ids, weights = dispatched.hidden_states, dispatched.topk_ids, dispatched.topk_weights
    layer = replace(quant_info.layer, first_expert=0)  # DeepEP's ids are local
    is_partial = quant_info.topology.is_partial
    if isinstance(dispatched, DeepepNormalDispatchOutput):
        out = _run(x, ids, weights, layer, quant_info.plans.pick(x.shape[0]), config, quant_info)
        return dispatched.result(out, is_partial)
    # Masked rows [E, M]: each is a token with one expert of weight 1, or with none if it is past the expert's count.
    ids_R1, ones_R1 = masked_rows(dispatched.masked_m, x.shape[1])
    likely_tokens = dispatched.expected_m * config.num_experts // config.top_k
    plan = quant_info.plans.pick(likely_tokens, may_be_direct=False)
    rows_RH = x.view(-1, x.shape[2])
    most = rows_RH.shape[0] if dispatched.max_rows is None else dispatched.max_rows
    out = _run(rows_RH, ids_R1, ones_R1, replace(layer, top_k=1), plan, config, quant_info, max_rows=most)
    return dispatched.result(out, is_partial)


def _run(
    x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, layer: "Layer", plan: Plan,
    config: MoeRunnerConfig, quant_info: TritonMoeQuantInfo, *, max_rows: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """`max_rows` as in `run_layer`; then the result's rows are as far apart as those of x."""
    from moe.kernels.launch import run_layer

    x_TH = x_TH.to(config.dtype)
    if x_TH.stride(-1) != 1:
        x_TH = x_TH.contiguous()
    num_rows, hidden_size = x_TH.shape
    pitch = hidden_size if max_rows is None else x_TH.stride(0)
    out_TH = quant_info.topology.alloc_output((num_rows, pitch), config.dtype)[:, :hidden_size]
    if layer.intermediate_size == 0:  # a rank may own no block of the intermediate axis
        return out_TH.zero_()
    run_layer(
        x_TH, ids_TK.to(torch.int32).contiguous(), weights_TK.float().contiguous(), layer, plan, out_TH,
        max_rows=max_rows,
    )  # fmt: skip
    return out_TH
