"""The MoE layer of every family, backend and transport: gate, top-k, dispatch, `MoeRunner`, combine, shared experts.

No other module of `model` computes experts. Shape letters: T tokens, H hidden, E experts.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from model.fused import kernel_module
from model.layer import Layer
from model.linear import GatedMlp
from model.shared_run import SharedRun
from moe import BypassedTopK, MoeA2ABackend, MoeBackend, MoeRunner, RoutingConfig, StandardTopK
from moe.check.selfcheck import SelfCheckReport
from moe.device import as_dtype
from moe.dispatch.base import abandon, mode_options
from moe.dispatch.gathered import GatheredDispatcher
from moe.dispatch.standard import StandardDispatcher
from moe.group import Group, PartialSum
from moe.overlap import SideStream
from moe.registry import load_backend
from moe.replicas import NO_TABLES, ExpertTables, count_and_place
from moe.routing import TopKOutput, drop_padding, route
from moe.types import StandardCombineInput

MOST_TOKENS_BESIDE = 8
"""Of a step whose shared experts run beside the routed ones: kernels of few tokens do not keep the memory busy. On an
H200, eight layers of DeepSeek-V3 decode one request 1.04 times as fast so, and 64 requests 0.97 times as fast."""


class Gate(Layer):
    """Router logits in `out_dtype`, which is what the expert backend wants to see.

    fp32 logits multiply fp32 weights by fp32 tokens. bf16 logits multiply bf16 by bf16, sum in fp32 and are rounded
    once: half the weights to read, at twice the rate or more.
    `weight_bf16` is set if bf16 holds the weights exactly, or if the logits are bf16 anyway: its product with bf16
    tokens, summed in fp32, is what the fused router computes.
    """

    def __init__(self, weight_EH: torch.Tensor, bias_E: torch.Tensor | None, out_dtype: torch.dtype) -> None:
        super().__init__()
        rounded_EH = weight_EH.bfloat16()
        is_bf16 = out_dtype is torch.bfloat16
        self.weight = nn.Parameter(rounded_EH if is_bf16 else weight_EH.float(), requires_grad=False)
        self.bias = None if bias_E is None else nn.Parameter(bias_E.float(), requires_grad=False)
        self.out_dtype = out_dtype
        is_exact = is_bf16 or torch.equal(rounded_EH.float(), self.weight)
        self.weight_bf16 = nn.Parameter(rounded_EH, requires_grad=False) if is_exact else None

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H] to logits [T, E]."""
        if self.out_dtype is not torch.bfloat16:
            logits_TE = F.linear(as_dtype(x_TH, torch.float32), self.weight, self.bias)
            return as_dtype(logits_TE, self.out_dtype)
        x_TH = x_TH.bfloat16()
        if is_on_gpu(x_TH):  # asked for fp32, since cuBLAS may add parts of a bf16 result in bf16
            logits_TE = torch.mm(x_TH, self.weight.T, out_dtype=torch.float32)
            return (logits_TE if self.bias is None else logits_TE + self.bias).bfloat16()
        return F.linear(x_TH, self.weight, None if self.bias is None else self.bias.bfloat16())


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """True for tensors of the devices that torch calls cuda."""
    return tensor.device.type == "cuda"


def fused_router(gate: Gate, routing: RoutingConfig) -> ModuleType | None:
    """The module whose `route` does this gate and top-k in one kernel; None if torch has to do it."""
    router = None if gate.weight_bf16 is None else kernel_module("moe.kernels.router", gate.weight.device)
    return router if router is not None and router.can_route(routing) else None


def replica_kernel(device: torch.device) -> Callable[..., StandardTopK] | None:
    """`count_and_place` as one kernel; None if torch has to do it."""
    replicas = kernel_module("moe.kernels.replicas", device)
    return None if replicas is None else replicas.count_and_place


class TokenSlices:
    """Divides the tokens that all ranks of `tp` have, so that a transport sends each of them once.

    Every rank but the last ones takes the same number; they may take fewer, or none.
    """

    def __init__(self, tp: Group) -> None:
        self._tp = tp

    def own(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[S, H]: this rank's tokens."""
        num_tokens = x_TH.shape[0]
        first = self.first(num_tokens)
        return x_TH[first : first + self.length(num_tokens)]

    def join(self, out_SH: torch.Tensor, partial_TH: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
        """[T, H] of all ranks' tokens, plus a sum over the ranks whose parts are `partial_TH`."""
        missing = self.length(num_tokens) * self._tp.size - num_tokens
        if partial_TH is not None:
            summed_SH = self._tp.reduce_scatter(F.pad(partial_TH, (0, 0, 0, missing)))
            out_SH = out_SH + summed_SH[: out_SH.shape[0]]
        padded_SH = F.pad(out_SH, (0, 0, 0, self.length(num_tokens) - out_SH.shape[0]))
        return self._tp.all_gather(padded_SH)[:num_tokens]

    def first(self, num_tokens: int) -> int:
        """The place of this rank's first token among all."""
        return self._tp.rank * self.length(num_tokens)

    def length(self, num_tokens: int) -> int:
        """Most tokens of one rank."""
        return -(-num_tokens // self._tp.size)


class MoeLayer(Layer):
    """Routed experts through one `MoeRunner`, plus the shared experts, which are added unscaled.

    The output of the shared experts may be one rank's part of a sum. Where the experts' output is one, too, they are
    added before the ranks' parts are, so that one sum over ranks does for both.

    `routes_inside`: the backend routes by itself and gets logits and rules instead of ids and weights. `runner` and
    `dispatcher` belong together; `quant_info` holds the processed weights and never changes.
    `slices` divides tokens that several ranks have. `tables`: counts tokens by expert, and finds the slots of experts
    that have replicas; dispatcher and runner then know slots alone. `description` names the path, for logs: "layer 3:
    torch / none / mxfp4". `selfcheck` is what the check at load found, None where it was not asked for.
    `side`: where the shared experts run while tokens travel, or beside the routed ones if a step has few tokens; None
    if they wait for those.
    `overlaps_down_gemm`: the dispatcher combines rows as soon as the second GEMM has signalled them.
    """

    correction_bias_E: torch.Tensor | None

    def __init__(
        self,
        *,
        gate: Gate,
        routing: RoutingConfig,
        routes_inside: bool,
        correction_bias_E: torch.Tensor | None,
        dispatcher: Any,
        runner: MoeRunner,
        quant_info: Any,
        shared_experts: GatedMlp | None,
        description: str,
        selfcheck: SelfCheckReport | None = None,
        slices: TokenSlices | None = None,
        tables: ExpertTables = NO_TABLES,
        side: SideStream | None = None,
        overlaps_down_gemm: bool = False,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.routing = routing
        self.routes_inside = routes_inside
        self.correction_bias_E = None if correction_bias_E is None else nn.Buffer(correction_bias_E)
        self.dispatcher = dispatcher
        self.runner = runner
        self.quant_info = quant_info
        self.shared_experts = shared_experts
        self.description = description
        self.selfcheck = selfcheck
        self.slices = slices
        self.tables = tables
        self._side = side if shared_experts is not None else None
        self._overlaps_down_gemm = overlaps_down_gemm
        self._router = None if routes_inside else fused_router(gate, routing)
        self._count_and_place = replica_kernel(gate.weight.device) or count_and_place
        if self._router is None:
            gate.weight_bf16 = None  # read by nobody else: 213 MB in all layers of DeepSeek-V3

    def why_not_capturable(self, max_num_tokens: int) -> str | None:
        """None if decode steps of up to `max_num_tokens` tokens can be captured in a CUDA graph, else the reason."""
        if not load_backend(self.runner.backend).is_capturable:
            return f"MoE {self.description}"
        own_tokens = max_num_tokens if self.slices is None else self.slices.length(max_num_tokens)
        reason = self.dispatcher.why_not_capturable(own_tokens)
        return None if reason is None else f"MoE {self.description} ({reason})"

    @property
    def has_own_kernels(self) -> bool:
        """Whether our Triton kernels alone read the ids of the chosen experts."""
        return self.runner.backend is MoeBackend.TRITON and self.runner.a2a is MoeA2ABackend.NONE

    @property
    def gathers_tokens(self) -> bool:
        """Whether `forward` has to know how many tokens the rank with the most of them has.

        Such a rank computes experts for the padding of all ranks, unless their routing says that it is padding.
        """
        return isinstance(self.dispatcher, GatheredDispatcher)

    def forward(
        self,
        x_TH: torch.Tensor,
        *,
        is_decode: bool = False,
        max_rank_tokens: int | None = None,
        num_live: torch.Tensor | None = None,
    ) -> torch.Tensor | PartialSum:
        """[T, H] to [T, H], complete or a part of a sum.

        `is_decode` chooses DeepEP's mode where both may run; all ranks pass the same.
        `max_rank_tokens`: of all data-parallel ranks; needed where `gathers_tokens`. `num_live`: see `StepState`.
        """
        own_SH = x_TH if self.slices is None else self.slices.own(x_TH)
        options: dict[str, Any] = dict(mode_options(self.runner.dispatch_formats, is_decode=is_decode))
        if self.gathers_tokens:
            options["max_rank_tokens"] = max_rank_tokens
        shared = SharedRun(self.shared_experts, x_TH, self._side_for(x_TH.shape[0]))
        first_token = 0 if self.slices is None else self.slices.first(x_TH.shape[0])
        try:
            dispatched = self.dispatcher.dispatch(own_SH, self._route(own_SH, num_live, first_token), **options)
        except Exception:
            shared.abandon()
            raise
        try:
            overlap = self.dispatcher.begin_overlap(dispatched) if self._overlaps_down_gemm else None
            if overlap is not None:
                self.runner.set_overlap_args(overlap)
            result = self.runner.run(dispatched, self.quant_info)
            shared.need_success()
        except Exception:
            shared.abandon()
            abandon(self.dispatcher, dispatched, self.runner.config.dtype)
            raise
        reduces = isinstance(self.dispatcher, StandardDispatcher | GatheredDispatcher) and result.is_partial
        if reduces and (partial_TH := shared.take()) is not None:
            self.dispatcher.add_own(result, partial_TH)
        beside: dict[str, Any] = {} if overlap is None else {"overlap": overlap}
        if reduces and isinstance(self.dispatcher, StandardDispatcher):
            return self.dispatcher.combine_later(cast(StandardCombineInput, result))
        out_SH: torch.Tensor = self.dispatcher.combine(result, **beside)
        shared_TH = None if reduces else shared.take()
        if self.slices is not None:
            return self.slices.join(out_SH, shared_TH, x_TH.shape[0])
        return out_SH if shared_TH is None else out_SH + shared_TH

    def _side_for(self, num_tokens: int) -> SideStream | None:
        """The second stream where the GPU has time: while tokens travel, or beside the experts of few tokens."""
        travels = not isinstance(self.dispatcher, StandardDispatcher | GatheredDispatcher)
        return self._side if travels or num_tokens <= MOST_TOKENS_BESIDE else None

    def _route(self, x_TH: torch.Tensor, num_live: torch.Tensor | None = None, first_token: int = 0) -> TopKOutput:
        if self._router is not None and x_TH.dtype == torch.bfloat16:
            gate = self.gate
            routed: TopKOutput = self._router.route(
                x_TH, gate.weight_bf16, gate.bias, self.routing, self.correction_bias_E, logits_dtype=gate.out_dtype,
                tables=self.tables, num_live=num_live, first_token=first_token, drops_padding=self.gathers_tokens,
            )  # fmt: skip
            return routed
        logits_TE = self.gate(x_TH)
        if self.routes_inside:
            return BypassedTopK(logits_TE, self.routing, self.correction_bias_E)
        topk = route(logits_TE, self.routing, self.correction_bias_E)
        if self.gathers_tokens and num_live is not None:
            topk = drop_padding(topk, num_live, first_token)
        if self.tables is NO_TABLES:
            return topk
        placed: TopKOutput = self._count_and_place(topk, self.tables, num_live, first_token)
        return placed
