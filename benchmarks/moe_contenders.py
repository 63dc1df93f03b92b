"""Who takes part in `bench_moe`: every way to run one expert layer, ours and rivals, behind one small interface.

Contenders are prepared on the device from canonical experts. They neither check nor time themselves.
Shape letters: T tokens, H hidden.
"""

import contextlib
import dataclasses
import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from benchmarks import rival_triton_kernels as triton_kernels
from benchmarks.copies import clone, tensors_in
from benchmarks.moe_cases import LayerCase, id_sets
from moe.config import MoeA2ABackend, MoeBackend
from moe.formats import ExpertWeights
from moe.kernels.plan import Plan
from moe.registry import load_backend
from moe.routing import StandardTopK
from moe.runner import MoeRunner
from moe.topology import Topology
from moe.tune.cache import TuningCache
from moe.tune.layers import tune_layer
from moe.types import StandardDispatchOutput


class Contender(ABC):
    """One prepared layer, in as many copies as `grow` was asked for.

    `is_ours`: its bits must not change from run to run. `skips_no_expert`: ids of -1 may be among its input.
    """

    is_ours = False
    skips_no_expert: ClassVar[bool] = True

    def __init__(self, name: str, layer: Any) -> None:
        self.name = name
        self.layers = [layer]

    @property
    def nbytes(self) -> int:
        """Bytes of one copy.

        Raises:
            ValueError: none that a copy could move, so that all copies would share one place in the L2.
        """
        num_bytes = sum(tensor.nbytes for tensor in tensors_in(self.layers[0]))
        if not num_bytes:
            raise ValueError(f"{self.name}: its prepared layer holds no tensors that can be copied")
        return num_bytes

    def grow(self, num_copies: int) -> None:
        """Have at least `num_copies` copies of the prepared weights, at addresses of their own."""
        while len(self.layers) < num_copies:
            self.layers.append(clone(self.layers[0]))

    def tokens(self, x_TH: torch.Tensor) -> torch.Tensor:
        """The input in the form that `run` takes; made outside the timing."""
        return x_TH

    def stage(self, topk: StandardTopK) -> Any:
        """The routing in the form that `run` takes; made outside the timing."""
        return topk

    def plan(self, num_tokens: int) -> Any:
        """What it chose for so many tokens, as JSON; None if nothing is known."""
        del num_tokens
        return None

    def tune(self, experts: ExpertWeights, token_counts: list[int], cache: TuningCache, seconds: float) -> None:
        """Choose among a library's tactics, where it has some. Comes before `grow`."""
        del experts, token_counts, cache, seconds

    def is_tuned(self, num_tokens: int) -> bool | None:
        """Whether this run has tuned it for so many tokens; None where it has nothing to tune."""
        del num_tokens
        return None

    def choose(self, measure: Callable[[], float]) -> None:
        """Measure what else can be set for the present number of tokens, where something can."""
        del measure

    @abstractmethod
    def run(self, copy: int, x_TH: torch.Tensor, routing: Any) -> torch.Tensor:
        """One call on one copy: bf16 [T, H], possibly with padding columns after H."""


class RunnerContender(Contender):
    """A backend of the service, called as the service calls it."""

    def __init__(self, name: str, case: LayerCase, experts: ExpertWeights, device: torch.device) -> None:
        backend = MoeBackend(name.removesuffix("_bare"))
        self.topology = Topology(device=device)
        self.runner = MoeRunner(backend, MoeA2ABackend.NONE, case.config())
        self.backend = load_backend(backend)
        super().__init__(name, self.backend.prepare(experts, case.config(), self.topology))
        self.is_ours = backend is MoeBackend.TRITON

    def run(self, copy: int, x_TH: torch.Tensor, routing: StandardTopK) -> torch.Tensor:
        return self.runner.run(StandardDispatchOutput(x_TH, routing), self.layers[copy]).hidden_states

    def plan(self, num_tokens: int) -> Any:
        plan = next((table.pick(num_tokens) for table in self._tables()), None)
        return dataclasses.asdict(plan) if isinstance(plan, Plan) else plan

    def _tables(self) -> list[Any]:
        """Launch plans of ours, profile numbers of FlashInfer: at most one."""
        return [getattr(self.layers[0], name) for name in ("plans", "profiles") if hasattr(self.layers[0], name)]

    def tune(self, experts: ExpertWeights, token_counts: list[int], cache: TuningCache, seconds: float) -> None:
        """By the service's own tuning. Ours keeps the plans that it ships with: a start measures nothing."""
        if self.is_ours:
            return
        self.layers = [
            tune_layer(
                self.runner, self.layers[0], experts,
                topology=self.topology, token_counts=token_counts, cache=cache, budget_s=seconds,
            )
        ]  # fmt: skip

    def is_tuned(self, num_tokens: int) -> bool | None:
        if self.is_ours or not self._tables():
            return None
        return self.plan(num_tokens) is not None


class BareFlashinfer(RunnerContender):
    """FlashInfer's MXFP4 kernel as its library likes it best: padded input and output, its own autotuner, and its fused
    reduction, which the service does without because it adds in another order every time.
    """

    def __init__(self, name: str, case: LayerCase, experts: ExpertWeights, device: torch.device) -> None:
        super().__init__(name, case, experts, device)
        self._case = case
        self._tuned_tokens: set[int] = set()

    def tokens(self, x_TH: torch.Tensor) -> torch.Tensor:
        num_columns = self.layers[0].padded_hidden_size - x_TH.shape[1]
        return torch.nn.functional.pad(x_TH, (0, num_columns))

    def run(self, copy: int, x_TH: torch.Tensor, routing: StandardTopK) -> torch.Tensor:
        with self._autotune(False, x_TH.shape[0]):
            return super().run(copy, x_TH, routing)

    def tune(self, experts: ExpertWeights, token_counts: list[int], cache: TuningCache, seconds: float) -> None:
        """One number of tokens after the other, until the time is up."""
        del experts, cache
        begin, device = time.monotonic(), self.topology.device
        for num_tokens in token_counts:
            if time.monotonic() - begin < seconds:
                x_TH = self.tokens(torch.randn(num_tokens, self._case.hidden_size, device=device).bfloat16())
                (topk,) = id_sets(self._case, num_tokens, "uniform", device, 1)
                with self._autotune(True, num_tokens):
                    super().run(0, x_TH, topk)
                self._tuned_tokens.add(num_tokens)

    def is_tuned(self, num_tokens: int) -> bool | None:
        return num_tokens in self._tuned_tokens

    @staticmethod
    def _autotune(is_on: bool, num_tokens: int) -> contextlib.AbstractContextManager[Any]:
        context = importlib.import_module("flashinfer.autotuner").autotune(is_on, tuning_buckets=(num_tokens,))
        assert isinstance(context, contextlib.AbstractContextManager)
        return context


class TritonKernels(Contender):
    """OpenAI's `triton_kernels`, from router logits: its top-k and its sort by expert are inside."""

    skips_no_expert = False
    routes_inside: ClassVar[bool] = True

    def __init__(self, name: str, case: LayerCase, experts: ExpertWeights, device: torch.device) -> None:
        del device
        super().__init__(name, triton_kernels.prepare(experts, case.activation))
        self.case = case
        self.warps = triton_kernels.WARPS[0]

    def stage(self, topk: StandardTopK) -> Any:
        logits_TE = triton_kernels.logits_for(topk, self.case.num_experts)
        return logits_TE if self.routes_inside else triton_kernels.route(logits_TE, self.case.top_k)

    def run(self, copy: int, x_TH: torch.Tensor, routing: Any) -> torch.Tensor:
        if self.routes_inside:
            routing = triton_kernels.route(routing, self.case.top_k)
        return triton_kernels.run(x_TH, routing, self.layers[copy], self.warps)

    def plan(self, num_tokens: int) -> Any:
        return {"num_warps": self.warps}

    def choose(self, measure: Callable[[], float]) -> None:
        """Both numbers of warps that are in use."""
        times: dict[int, float] = {}
        for self.warps in triton_kernels.WARPS:
            times[self.warps] = measure()
        self.warps = min(times, key=times.__getitem__)

    def is_tuned(self, num_tokens: int) -> bool | None:
        return True  # `choose` comes before every row


class BareTritonKernels(TritonKernels):
    """Its two matrix products and its sum alone: top-k and sort are done before, which flatters it."""

    routes_inside = False


_KINDS: dict[str, type[Contender]] = {
    "flashinfer_mxfp4_bare": BareFlashinfer,
    "triton_kernels": TritonKernels,
    "triton_kernels_bare": BareTritonKernels,
}
FORMATS = {
    "triton": ("mxfp4", "bf16", "fp8_block", "nvfp4"),
    "flashinfer_mxfp4": ("mxfp4",),
    "flashinfer_mxfp4_bare": ("mxfp4",),
    "flashinfer_cutlass": ("bf16", "fp8_block"),
    "triton_kernels": ("mxfp4",),
    "triton_kernels_bare": ("mxfp4",),
}


def prepare(name: str, case: LayerCase, experts: ExpertWeights, device: torch.device) -> Contender:
    """The contender of that name, one of FORMATS, on `device`, where the experts lie."""
    return _KINDS.get(name, RunnerContender)(name, case, experts, device)  # type: ignore[call-arg]
