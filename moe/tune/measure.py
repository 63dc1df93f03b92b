"""Measures one tactic of one layer on this rank, and compares it with the reference. Chooses nothing.

Tokens are put into the transport's layout beforehand (`dispatch.loopback`); dispatch and combine are not timed.
Shape letters: T tokens, K top-k, H hidden.
"""

import concurrent.futures
import contextlib
import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from moe.backend import CheckCase, Tactic
from moe.check.selfcheck import BLOCK, loopback_of, reference
from moe.config import DispatchFormat
from moe.cpu.threads import usable_cpus
from moe.dispatch.base import AnyExchange
from moe.formats import ExpertWeights
from moe.formats.activation_quant import ActivationQuant
from moe.registry import load_backend
from moe.routing import BypassedTopK, StandardTopK
from moe.runner import MoeRunner
from moe.topology import Topology
from moe.tune.policy import Batch
from moe.types import DispatchOutput, MoeQuantInfo, StandardDispatchOutput

_ROUNDS = 5
_HOPELESS = 1.3  # stop measuring a tactic that takes this many times as long as the fastest so far
_MANY_INPUTS, _FEW_INPUTS = 8, 2  # few tokens use few experts: vary them, or they stay in the L2
_CHECKED_TOKENS = 1024
_FIRST_WAIT_CYCLES, _LAST_WAIT_CYCLES = 1 << 21, 1 << 25  # of the GPU, about 1 and 17 ms
_MAX_THREADS = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The inputs for one token count, and the checked rows of the first input with their expected outputs."""

    dispatched: list[DispatchOutput]
    first: list[tuple[DispatchFormat, AnyExchange, DispatchOutput]]
    rows: torch.Tensor
    x_RH: torch.Tensor
    topk: StandardTopK
    want_RH: dict[ActivationQuant | None, torch.Tensor]


class Measurer:
    """Measures and checks the tactics of one layer."""

    def __init__(self, runner: MoeRunner, info: MoeQuantInfo, experts: ExpertWeights, topology: Topology) -> None:
        self._runner, self._info, self._experts, self._topology = runner, info, experts, topology
        self._backend = load_backend(runner.backend)
        self._inputs: dict[int, _Inputs] = {}
        self._fastest: dict[int, float] = {}
        self._wait_cycles = _FIRST_WAIT_CYCLES
        self.num_measured = 0

    def warm_up(self, batch: Batch, seconds: float) -> Batch:
        """Compile in parallel if first runs compile. Returns the part of the batch not started when time ran out."""
        if not self._backend.compiles_tactics:
            return ()
        if seconds <= 0:
            return batch
        end = time.monotonic() + seconds
        for _, num_tokens in batch:
            self._inputs_for(num_tokens)
        self._run_once(*batch[0])  # one thread alone does the library's one-time setup
        pool = concurrent.futures.ThreadPoolExecutor(min(_MAX_THREADS, usable_cpus()))
        futures = [pool.submit(self._run_once, tactic, num_tokens) for tactic, num_tokens in batch[1:]]
        concurrent.futures.wait(futures, timeout=max(0.0, end - time.monotonic()))
        pool.shutdown(wait=True, cancel_futures=True)
        return [entry for entry, future in zip(batch[1:], futures, strict=True) if future.cancelled()]

    def run_as_served(self, num_tokens: int) -> None:
        """One call as in serving, with logits if the kernel routes: the library's choice of tactics depends on that."""
        config, backend = self._runner.config, self._backend
        x_TH, topk = self._tokens(num_tokens, 0)
        for dispatch_format in self._runner.dispatch_formats:
            dispatched: DispatchOutput
            if dispatch_format is DispatchFormat.STANDARD and backend.routes_inside and config.routing is not None:
                dtype = backend.router_logits_dtype(self._experts.format_name)
                logits = torch.randn(num_tokens, config.num_experts, device=x_TH.device).to(dtype)
                dispatched = StandardDispatchOutput(x_TH, BypassedTopK(logits, config.routing))
            else:
                loopback = loopback_of(self._runner, self._experts, self._topology, dispatch_format)
                dispatched = loopback.dispatch(x_TH, topk)
            with self._device():
                self._runner.run(dispatched, self._info)

    def seconds(self, tactic: Tactic, num_tokens: int) -> float:
        """Time of one call: the median of several rounds, infinite if the tactic does not run here."""
        self.num_measured += 1

        def measure() -> float:
            calls = self._calls(tactic, num_tokens)
            for call in calls[:2]:
                call()
            is_cuda = self._topology.device.type == "cuda"
            if is_cuda:
                torch.cuda.synchronize()
            one_round = self._cuda_round if is_cuda else _host_round
            fastest = self._fastest.get(num_tokens, math.inf)
            seconds = _median_round(lambda: one_round(calls) / len(calls), fastest)
            self._fastest[num_tokens] = min(fastest, seconds)
            return seconds

        return self._or_infinite(measure, tactic, num_tokens)

    def error(self, tactic: Tactic, num_tokens: int) -> float:
        """The largest relative error of any checked token, and of any block of outputs over all checked tokens.

        As a fraction of the tolerance that the self-check has for this tactic.
        """
        return self._or_infinite(lambda: self._error(tactic, num_tokens), tactic, num_tokens)

    def _or_infinite(self, figure: Callable[[], float], tactic: Tactic, num_tokens: int) -> float:
        try:
            with self._device():
                return figure()
        except Exception as error:  # each library has errors of its own for what a device cannot run
            logger.debug("%s: tactic %s does not run at %d tokens: %s",
                         self._runner.backend, tactic, num_tokens, str(error)[:200])  # fmt: skip
            return math.inf

    def _error(self, tactic: Tactic, num_tokens: int) -> float:
        inputs = self._inputs_for(num_tokens)
        info = self._with(tactic, num_tokens)
        worst = 0.0
        for dispatch_format, loopback, dispatched in inputs.first:
            case = self._case(info, dispatch_format, num_tokens)
            with _new_memory_is_nan():
                result = self._runner.run(dispatched, info)
            got_RH = loopback.combine(result)[inputs.rows].float()
            worst = max(worst, _largest_error(got_RH, self._want(inputs, case)) / case.tolerance)
        return worst

    def _case(self, info: MoeQuantInfo, dispatch_format: DispatchFormat, num_tokens: int) -> CheckCase:
        """The self-check's case for this number of tokens."""
        cases = self._backend.check_cases(info, self._experts.format_name, self._runner.config, dispatch_format)
        return next(case for case in cases if case.max_tokens is None or num_tokens <= case.max_tokens)

    def _want(self, inputs: _Inputs, case: CheckCase) -> torch.Tensor:
        quantize = case.quantize_input
        if quantize not in inputs.want_RH:
            inputs.want_RH[quantize] = reference(
                self._runner, self._experts, self._topology, inputs.x_RH, inputs.topk, quantize
            )
        return inputs.want_RH[quantize]

    def _with(self, tactic: Tactic, num_tokens: int) -> MoeQuantInfo:
        return self._backend.with_choice(self._info, {str(num_tokens): tactic})

    def _run_once(self, tactic: Tactic, num_tokens: int) -> None:
        """Run in a thread. Errors are ignored: the tactic fails again when it is measured, and is reported then."""
        with contextlib.suppress(Exception), self._device():
            self._calls(tactic, num_tokens)[0]()

    def _device(self) -> contextlib.AbstractContextManager[None]:
        """Make the layer's GPU the current device of this thread, so that kernels launch there."""
        device = self._topology.device
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

    def _calls(self, tactic: Tactic, num_tokens: int) -> list[Callable[[], object]]:
        info = self._with(tactic, num_tokens)
        inputs = self._inputs_for(num_tokens).dispatched
        return [functools.partial(self._runner.run, dispatched, info) for dispatched in inputs]

    def _inputs_for(self, num_tokens: int) -> _Inputs:
        if num_tokens not in self._inputs:
            self._inputs[num_tokens] = self._make_inputs(num_tokens)
        return self._inputs[num_tokens]

    def _make_inputs(self, num_tokens: int) -> _Inputs:
        config, topology = self._runner.config, self._topology
        is_few = num_tokens * config.top_k < 4 * config.num_experts
        dispatched: list[DispatchOutput] = []
        first: list[tuple[DispatchFormat, AnyExchange, DispatchOutput]] = []
        rows = torch.linspace(0, num_tokens - 1, min(num_tokens, _CHECKED_TOKENS)).long().to(topology.device)
        for seed in range(_MANY_INPUTS if is_few else _FEW_INPUTS):
            x_TH, topk = self._tokens(num_tokens, seed)
            for dispatch_format in self._runner.dispatch_formats:
                loopback = loopback_of(self._runner, self._experts, topology, dispatch_format)
                dispatched.append(loopback.dispatch(x_TH, topk))
                if seed == 0:
                    first.append((dispatch_format, loopback, dispatched[-1]))
        x_TH, topk = self._tokens(num_tokens, 0)  # the first once more
        return _Inputs(dispatched, first, rows, x_TH[rows], StandardTopK(topk.weights[rows], topk.ids[rows]), {})

    def _tokens(self, num_tokens: int, seed: int) -> tuple[torch.Tensor, StandardTopK]:
        """Random tokens with uniform routing over the experts of all ranks.

        The first token has a local expert, a different one for each seed, so that no expert stays in the L2.
        """
        config, device = self._runner.config, self._topology.device
        g = torch.Generator(device).manual_seed(1000 * num_tokens + seed)
        x_TH = torch.randn(num_tokens, config.hidden_size, generator=g, device=device)
        scores = torch.rand(num_tokens, config.num_experts, generator=g, device=device)
        own = self._topology.expert_range(config.num_experts)
        scores[0, own[seed % len(own)]] = 2.0
        weights_TK = 0.5 + torch.rand(num_tokens, config.top_k, generator=g, device=device)
        weights_TK /= weights_TK.sum(1, keepdim=True)
        return x_TH.to(config.dtype), StandardTopK(weights_TK, scores.topk(config.top_k).indices.int())

    def _cuda_round(self, calls: list[Callable[[], object]]) -> float:
        """Time by CUDA events. All calls are queued while the GPU waits, so the host's time does not count."""
        while True:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(self._wait_cycles)
            start.record()
            for call in calls:
                call()
            end.record()
            was_queued = not start.query()
            end.synchronize()
            if was_queued or self._wait_cycles >= _LAST_WAIT_CYCLES:
                return start.elapsed_time(end) * 1e-3
            self._wait_cycles *= 2  # the host was too slow to queue everything meanwhile


def _host_round(calls: list[Callable[[], object]]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start


def _median_round(one_round: Callable[[], float], fastest: float) -> float:
    """Median of several rounds; only one round if it is far slower than the `fastest` tactic so far."""
    seconds = [one_round()]
    if seconds[0] <= _HOPELESS * fastest:
        seconds += [one_round() for _ in range(_ROUNDS - 1)]
    return statistics.median(seconds)


def _largest_error(got_RH: torch.Tensor, want_RH: torch.Tensor) -> float:
    """The largest relative error of any token, and of any block of outputs over all tokens."""
    difference_RH = got_RH - want_RH
    worst = _largest_ratio(difference_RH.norm(dim=1), want_RH.norm(dim=1))
    for difference, want in zip(difference_RH.split(BLOCK, 1), want_RH.split(BLOCK, 1), strict=True):
        worst = max(worst, _largest_ratio(difference.norm()[None], want.norm()[None]))
    return worst


def _largest_ratio(difference: torch.Tensor, size: torch.Tensor) -> float:
    """The largest difference / size. NaN counts as infinite; where the expected size is 0, so must the result be."""
    ratio = torch.where(size > 0, difference / size, torch.where(difference > 0, math.inf, 0.0))
    return float(torch.where(difference.isnan(), math.inf, ratio).max())


@contextlib.contextmanager
def _new_memory_is_nan() -> Iterator[None]:
    """Make torch fill new memory with NaN, so that outputs a kernel did not write cannot pass as correct."""
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
