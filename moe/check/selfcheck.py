"""Self-check: compares one layer's prepared weights and path with the reference, expert by expert, while loading.

The path gets its tokens in the layout of every dispatch format it was built for (`dispatch.loopback` makes them). A
kernel that routes inside is checked expert by expert with ids, then once with logits.
Every local expert gets its own tokens. Half are large enough to be clamped and half are not, which exposes a wrong
clamp as well as a wrong weight that a clamp would hide. A few tokens go to several experts.
Every code path of a backend is checked, for example one for few and one for many tokens (`Backend.check_cases`).
Shape letters: T tokens, S token groups, K top-k, E local experts, H hidden, B blocks of 128 outputs.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from moe.backend import CheckCase
from moe.check.reference import reference_moe
from moe.config import DispatchFormat, MoeRunnerConfig, RoutingConfig, RoutingMethod
from moe.dispatch.base import AnyExchange
from moe.dispatch.loopback import make_loopback
from moe.errors import SelfCheckError, WeightFormatError
from moe.formats import ExpertWeights
from moe.formats.activation_quant import ActivationQuant
from moe.registry import load_backend
from moe.routing import BypassedTopK, StandardTopK, TopKOutput
from moe.runner import MoeRunner
from moe.topology import Topology
from moe.types import MoeQuantInfo

BLOCK = 128  # outputs per error: an average over thousands of outputs would hide one wrong row of scales
TOKENS_PER_SIZE = 4
TOKENS_PER_EXPERT = 2 * TOKENS_PER_SIZE  # first large ones, then small ones
NUM_MIXED_TOKENS = 8
MIXED_SETS = NUM_MIXED_TOKENS // TOKENS_PER_SIZE
ROUTED_TOKENS = 4 * NUM_MIXED_TOKENS
BF16_INTEGERS = 256  # bf16 is exact for integers up to this
LARGE, SMALL = 1.5, 0.25  # typical input of the activation, in units of its limit
_MAX_SIZE = 1e12  # of a factor for inputs
_LIMIT_OF_PLAIN = 4.0  # without a limit: where silu is well away from linear


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SelfCheckReport:
    """A layer that passed: its path and the largest relative error of any expert and block.

    If cases have different tolerances, error and tolerance are those of the case with the highest error / tolerance.
    """

    layer: int
    path: str
    worst_error: float
    tolerance: float


def check_layer(
    runner: MoeRunner, quant_info: MoeQuantInfo, experts: ExpertWeights, *, layer: int, topology: Topology
) -> SelfCheckReport:
    """Run test tokens through the path and compare with the reference. `experts` are this rank's canonical weights.

    Besides the tokens, it needs memory for one dequantized fp32 matrix and the temporaries of dequantizing: measured
    0.26 GiB for a layer of 32 experts of 2880 x 2880 in MXFP4 (0.40 GiB), 0.37 GiB in DeepEP's layouts.

    Raises:
        SelfCheckError: an expert, or the sum of several, is off by more than the path's tolerance.
        WeightFormatError: the reference itself gets NaN or infinity from the weights of an expert.
    """
    backend, config = load_backend(runner.backend), runner.config
    check = _Check(runner, experts, layer, topology)
    x_TH, topk = _check_tokens(experts, config, topology)
    for dispatch_format, case, local_experts in _cases(runner, quant_info, experts):
        check.need_right(dispatch_format, case, local_experts, x_TH, topk)
    if backend.routes_inside and config.routing is not None:
        *_, case = backend.check_cases(quant_info, experts.format_name, config, DispatchFormat.STANDARD)
        logits_dtype = backend.router_logits_dtype(experts.format_name)
        logits = _distinct_routing(ROUTED_TOKENS, config.routing, logits_dtype, topology.device)
        check.need_right_routing(case, x_TH[-NUM_MIXED_TOKENS:].repeat(ROUTED_TOKENS // NUM_MIXED_TOKENS, 1), logits)
    return SelfCheckReport(layer=layer, path=check.path, worst_error=check.worst_error, tolerance=check.tolerance)


def run_cases(runner: MoeRunner, quant_info: MoeQuantInfo, experts: ExpertWeights, topology: Topology) -> None:
    """Launch what `check_layer` launches, without routing by the kernel, and compare nothing."""
    check = _Check(runner, experts, 0, topology)
    x_TH, topk = _check_tokens(experts, runner.config, topology)
    for dispatch_format, case, local_experts in _cases(runner, quant_info, experts):
        check.outputs(dispatch_format, case, _sets_of(case, local_experts, experts.num_experts), x_TH, topk)


def _cases(
    runner: MoeRunner, quant_info: MoeQuantInfo, experts: ExpertWeights
) -> Iterator[tuple[DispatchFormat, CheckCase, Sequence[int]]]:
    """Each code path of each dispatch format, and the local experts that get tokens of their own.

    All cases read the same processed bytes, so one case is enough to find wrong weights: the one with the lowest
    tolerance, and of those the one for the most tokens. It runs first, so its error names the expert. The other cases
    look for wrong code, which takes few tokens.
    """
    for dispatch_format in runner.dispatch_formats:
        cases = load_backend(runner.backend).check_cases(
            quant_info, experts.format_name, runner.config, dispatch_format
        )
        strictest = min(reversed(cases), key=lambda case: case.tolerance)
        yield dispatch_format, strictest, range(experts.num_experts)
        for case in cases:
            if case is not strictest:
                yield dispatch_format, case, _some_experts(case, experts.num_experts)


def reference(
    runner: MoeRunner, experts: ExpertWeights, topology: Topology, x_TH: torch.Tensor, topk: StandardTopK,
    quantize_input: ActivationQuant | None,
) -> torch.Tensor:  # fmt: skip
    """Reference output of this rank's experts, fp32 [T, H]; `quantize_input` is that of the `CheckCase`."""
    backend, config = load_backend(runner.backend), runner.config
    if experts.b2 is not None and topology.tp_rank:  # another rank adds this bias to the sum
        experts = dataclasses.replace(experts, b2=torch.zeros_like(experts.b2))
    return reference_moe(
        x_TH, topk, backend.as_computed(experts, topology), config.activation,
        quantize_input=quantize_input, first_expert=topology.expert_range(config.num_experts).start,
    )  # fmt: skip


def loopback_of(
    runner: MoeRunner, experts: ExpertWeights, topology: Topology, dispatch_format: DispatchFormat
) -> AnyExchange:
    """The loopback of one dispatch format, which gives the runner tokens in the transport's layout."""
    scales = experts.layer_input_scales
    return make_loopback(
        dispatch_format, runner.config, topology,
        expert_alignment=load_backend(runner.backend).expert_alignment,
        input_scale=None if scales is None else scales[0],
    )  # fmt: skip


class _Check:
    """One layer under test: runs it, holds the expected outputs and raises the error."""

    def __init__(self, runner: MoeRunner, experts: ExpertWeights, layer: int, topology: Topology) -> None:
        self._runner, self._experts, self._layer, self._topology = runner, experts, layer, topology
        self._first_expert = topology.expert_range(runner.config.num_experts).start
        self._want_TH: dict[ActivationQuant | None, torch.Tensor] = {}  # of all tokens, by input rounding
        self.path = f"{runner.backend}/{runner.a2a}/{experts.format_name}"
        self.worst_error, self.tolerance = 0.0, math.inf

    def need_right(
        self, dispatch_format: DispatchFormat, case: CheckCase, local_experts: Sequence[int], x_TH: torch.Tensor,
        topk: StandardTopK,
    ) -> None:  # fmt: skip
        """Check the token groups of some experts and the mixed groups, at most `case.max_tokens` tokens per call."""
        if case.quantize_input not in self._want_TH:
            want_TH = self._reference(case, x_TH, topk)
            self._need_finite(want_TH)
            self._want_TH[case.quantize_input] = want_TH
        sets = _sets_of(case, local_experts, self._experts.num_experts)
        got_TH = self.outputs(dispatch_format, case, sets, x_TH, topk)
        error_SB = _errors(got_TH, self._want_TH[case.quantize_input][_rows_of(sets, x_TH.device)])
        alone_SB, mixed_SB = error_SB[:-MIXED_SETS], error_SB[-MIXED_SETS:]
        self._need(dispatch_format, case, alone_SB, lambda row: f"expert {self._first_expert + sets[row] // 2}")
        self._need(dispatch_format, case, mixed_SB, lambda _: "the sum over several experts")

    def outputs(
        self, dispatch_format: DispatchFormat, case: CheckCase, sets: Sequence[int], x_TH: torch.Tensor,
        topk: StandardTopK,
    ) -> torch.Tensor:  # fmt: skip
        """The path's outputs for the tokens of some groups, fp32 [T, H]."""
        rows_T = _rows_of(sets, x_TH.device)
        num_rows = len(rows_T)
        got_TH = torch.empty((num_rows, x_TH.shape[1]), dtype=torch.float32, device=x_TH.device)
        size = min(case.max_tokens or num_rows, num_rows)
        for begin in range(0, num_rows, size):
            start = min(begin, num_rows - size)  # full chunks only: kernels may be compiled per size
            some_T = rows_T[start : start + size]
            chunk = StandardTopK(topk.weights[some_T], topk.ids[some_T])
            got_TH[start : start + size] = self._run(dispatch_format, case, x_TH[some_T], chunk)
        return got_TH

    def need_right_routing(self, case: CheckCase, x_TH: torch.Tensor, logits: BypassedTopK) -> None:
        """Check with router logits, so that the kernel routes."""
        want_TH = self._reference(case, x_TH, logits.to_standard())
        error_SB = _errors(self._run(DispatchFormat.STANDARD, case, x_TH, logits), want_TH)
        self._need(DispatchFormat.STANDARD, case, error_SB, lambda _: "what the kernel's own routing chose")

    def _reference(self, case: CheckCase, x_TH: torch.Tensor, topk: StandardTopK) -> torch.Tensor:
        return reference(self._runner, self._experts, self._topology, x_TH, topk, case.quantize_input)

    def _run(
        self, dispatch_format: DispatchFormat, case: CheckCase, x_TH: torch.Tensor, topk: TopKOutput
    ) -> torch.Tensor:
        """The path's output, fp32 [T, H], for tokens in the layout of `dispatch_format`."""
        loopback = loopback_of(self._runner, self._experts, self._topology, dispatch_format)
        return loopback.combine(self._runner.run(loopback.dispatch(x_TH, topk), case.quant_info)).float()

    def _need_finite(self, want_TH: torch.Tensor) -> None:
        """Raise WeightFormatError if the reference is not finite for every token of `_check_tokens`."""
        is_bad_T = ~torch.isfinite(want_TH).all(1)
        if not bool(is_bad_T.any()):
            return
        expert = int(is_bad_T.int().argmax()) // TOKENS_PER_EXPERT  # the tokens of one expert come before mixed ones
        whose = f"expert {self._first_expert + expert}" if expert < self._experts.num_experts else "several experts"
        raise WeightFormatError(
            f"layer {self._layer}: the {self._experts.format_name} weights of {whose} give NaN or infinity, computed "
            "in plain fp32. The file is damaged, or its export went wrong: download it again, or take another upload "
            "of the model"
        )

    def _need(
        self, dispatch_format: DispatchFormat, case: CheckCase, error_SB: torch.Tensor, who: Callable[[int], str]
    ) -> None:
        """Raise SelfCheckError if any row is off by more than the tolerance; `who` names a row."""
        worst, index = error_SB.flatten().max(0)
        error = float(worst)
        if error <= case.tolerance:
            if error / case.tolerance >= self.worst_error / self.tolerance:
                self.worst_error, self.tolerance = error, case.tolerance
            return
        row, block = divmod(int(index), error_SB.shape[1])
        layout = f" ({dispatch_format})" if len(self._runner.dispatch_formats) > 1 else ""
        end = min(self._experts.hidden_size, (block + 1) * BLOCK)
        way = f" with the {case.name}" if case.name else ""
        raise SelfCheckError(
            f"layer {self._layer}, {self.path}{layout}: {who(row)} differs from the reference by {error:.3g} "
            f"in outputs {block * BLOCK}..{end - 1}{way}; the tolerance is {case.tolerance:.3g}"
        )


def _some_experts(case: CheckCase, num_experts: int) -> list[int]:
    """Evenly spaced local experts, enough for about two calls of `max_tokens`; without that limit, all of them."""
    if case.max_tokens is None:
        return list(range(num_experts))
    num_chosen = min(num_experts, max(2, 2 * case.max_tokens // TOKENS_PER_EXPERT))
    chosen: list[int] = torch.linspace(0, num_experts - 1, num_chosen).round().int().tolist()
    return chosen


def _rows_of(sets: Sequence[int], device: torch.device) -> torch.Tensor:
    """Indices of the tokens of some groups, one after another."""
    rows = [row for which in sets for row in range(which * TOKENS_PER_SIZE, (which + 1) * TOKENS_PER_SIZE)]
    return torch.tensor(rows, device=device)


def _sets_of(case: CheckCase, local_experts: Sequence[int], num_experts: int) -> list[int]:
    """Indices of the token groups to run: two per expert, repeated for the first experts when the case wants many rows
    at one expert, then the mixed groups.

    The rows at one expert must arrive in one call, so they come first and are at most `max_tokens`.
    """
    sets = []
    for expert, num_wanted in itertools.zip_longest(
        local_experts, case.rows_at_one_expert[: len(local_experts)], fillvalue=0
    ):
        num_tokens = num_wanted if case.max_tokens is None else min(num_wanted, case.max_tokens)
        num_sets = max(2, -(-num_tokens // TOKENS_PER_SIZE))
        sets += [2 * expert + place % 2 for place in range(num_sets)]
    return sets + [2 * num_experts + place for place in range(MIXED_SETS)]


def _distinct_routing(
    num_tokens: int, routing: RoutingConfig, logits_dtype: torch.dtype, device: torch.device
) -> BypassedTopK:
    """Router logits without near-ties among the candidates, even in bf16, and a correction bias."""
    g = torch.Generator().manual_seed(1)
    rank_TE = torch.rand(num_tokens, routing.num_experts, generator=g).argsort(1)
    num_distinct = min(routing.num_experts, BF16_INTEGERS)
    step_TE = (rank_TE - (routing.num_experts - num_distinct)).clamp(min=0)
    logits_TE = (2 * step_TE - (num_distinct - 1)) * (4.0 / num_distinct)
    bias_E = None
    if routing.method is not RoutingMethod.SOFTMAX_AFTER_TOPK:
        bias_E = (torch.randint(-8, 9, (routing.num_experts,), generator=g) / 64).to(device)
    return BypassedTopK(logits_TE.to(device, logits_dtype), routing, bias_E)


def _check_tokens(
    experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology
) -> tuple[torch.Tensor, StandardTopK]:
    """Test tokens: first `TOKENS_PER_EXPERT` for each local expert, then `NUM_MIXED_TOKENS` with several experts."""
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
    x_H = x_TH[0].to(topology.device)
    size_E = torch.stack([_input_size(experts, expert, x_H, config) for expert in range(len(own))]).cpu()
    size_T = torch.cat((size_E.repeat_interleave(TOKENS_PER_EXPERT), size_E.min().expand(NUM_MIXED_TOKENS)))
    is_large_T = torch.arange(num_tokens) % TOKENS_PER_EXPERT < TOKENS_PER_SIZE
    x_TH = x_TH * (size_T * torch.where(is_large_T, LARGE, SMALL))[:, None]
    device = topology.device
    return x_TH.to(device, config.dtype), StandardTopK(weights_TK.to(device), ids_TK.to(device))


def _input_size(experts: ExpertWeights, expert: int, x_H: torch.Tensor, config: MoeRunnerConfig) -> torch.Tensor:
    """Factor for x that brings W13 x to about the activation's limit, from the first block of gate and of up rows.

    1 where that product is not finite, or so small that other rows would overflow. Computed where weights and `x_H`
    are, without waiting for the device: a layer may have hundreds of experts.
    """
    inter = experts.intermediate_size
    if inter == 0:
        return x_H.new_ones(())
    w13 = experts.w13.select(expert)
    starts = (0, inter // BLOCK * BLOCK)  # block-scaled weights can only be cut between blocks
    parts = [w13.narrow(0, start, min(BLOCK, 2 * inter - start)).dequantize() @ x_H for start in starts]
    y_B = torch.cat(parts)
    typical = torch.linalg.vector_norm(y_B, dtype=torch.float64) / math.sqrt(len(y_B))  # in fp32 squares may overflow
    limit = config.activation.limit or _LIMIT_OF_PLAIN
    can_divide = (typical > limit / _MAX_SIZE) & torch.isfinite(typical)
    return torch.where(can_divide, limit / typical, torch.ones_like(typical)).float()


def _errors(got_TH: torch.Tensor, want_TH: torch.Tensor) -> torch.Tensor:
    """Relative RMS error [S, B] of each group of `TOKENS_PER_SIZE` tokens and block; NaN counts as infinite.

    Errors are relative per token, because large tokens would hide the errors of small ones. A block whose outputs are
    much smaller than the token's others is measured against the others. The mean is over the tokens of a group: a wrong
    weight affects them all, an unlucky rounding only one.
    """
    whole_T1 = want_TH.square().mean(1, keepdim=True).sqrt()
    columns = []
    for difference, want in zip((got_TH - want_TH).split(BLOCK, 1), want_TH.split(BLOCK, 1), strict=True):
        error_T1 = difference.square().mean(1, keepdim=True).sqrt()
        scale_T1 = torch.maximum(want.square().mean(1, keepdim=True).sqrt(), 1e-2 * whole_T1)
        columns.append(torch.where(scale_T1 > 0, error_T1 / scale_T1, error_T1))
    error_TB = torch.cat(columns, dim=1).nan_to_num(nan=float("inf"))
    return error_TB.square().unflatten(0, (-1, TOKENS_PER_SIZE)).mean(1).sqrt()
