"""Who takes part in `bench_moe`: every way to run one expert layer, ours and rivals, behind one small interface.

Contenders are prepared on the device from canonical experts. They neither check nor time themselves.
Shape letters: T tokens, H hidden.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from benchmarks import rival_triton_kernels as triton_kernels
from benchmarks.copies import clone, tensors_in
from benchmarks.moe_cases import LayerCase
from moe.config import MoeA2ABackend, MoeBackend
from moe.formats import ExpertWeights
from moe.registry import load_backend
from moe.runner import MoeRunner
from moe.topology import Topology
from moe.tuning_cache import TuningCache
from moe.types import StandardDispatchOutput, StandardTopK


class Contender(ABC):
    """One prepared layer, in as many copies as `grow` was asked for.

    `is_ours`: its bits must not change from run to run. `skips_no_expert`: ids of -1 may be among its input.
    `tuned`: None where this run had nothing to tune, else whether it was tuned.
    """

    is_ours = False
    skips_no_expert: ClassVar[bool] = True

    def __init__(self, name: str, layer: Any) -> None:
        self.name = name
        self.layers = [layer]
        self.tuned: bool | None = None

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
        if self.is_ours:
            return dataclasses.asdict(self.layers[0].plans.pick(num_tokens))
        return self.backend.choice_text(self.layers[0], num_tokens) if self.tuned else None

    def tune(self, experts: ExpertWeights, token_counts: list[int], cache: TuningCache, seconds: float) -> None:
        """By the service's own tuning. Ours keeps the plans that it ships with: a start measures nothing."""
        from moe.tuning import tune_layer

        if self.is_ours:
            return
        (info,) = self.layers
        self.layers = [
            tune_layer(
                self.runner, info, experts,
                topology=self.topology, token_counts=token_counts, cache=cache, budget_s=seconds,
            )
        ]  # fmt: skip
        self.tuned = None if self.layers[0] is info else True


class BareFlashinfer(RunnerContender):
    """FlashInfer's MXFP4 kernel without the backend's padding copies: input comes padded, output stays so."""

    def tokens(self, x_TH: torch.Tensor) -> torch.Tensor:
        num_columns = self.layers[0].padded_hidden_size - x_TH.shape[1]
        return torch.nn.functional.pad(x_TH, (0, num_columns))


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
        self.tuned = True


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
