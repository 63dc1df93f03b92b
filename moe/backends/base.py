"""What every backend answers: where it runs, what it refuses, and how it processes canonical weights."""

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from moe.config import DispatchFormat, MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.dispatch.dtype import Quantize
from moe.errors import MoeConfigError, WeightFormatError
from moe.formats import ExpertWeights
from moe.formats.activation_quant import ActivationQuant
from moe.formats.sizes import expert_bytes
from moe.packages import not_installed
from moe.topology import Topology
from moe.tune.cache import Tactic, TacticTable
from moe.types import RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The device a path is asked about; needs no hardware. `arch` is sm80, sm90, gfx942, cpu and the like."""

    arch: str

    @property
    def is_cuda(self) -> bool:
        """True for NVIDIA GPUs."""
        return self.arch.startswith("sm")

    @property
    def is_rocm(self) -> bool:
        """True for AMD GPUs."""
        return self.arch.startswith("gfx")


def cuda_arch(device: torch.device) -> str:
    """Of an NVIDIA GPU, by its compute capability: "sm90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def wrong_size(format_name: str, hidden_size: int, intermediate_size: int, multiples: tuple[int, int]) -> str | None:
    """None where both sizes of a rank are positive multiples of what the kernel's tiles need, else the reason."""
    for name, size, multiple in (
        ("hidden_size", hidden_size, multiples[0]),
        ("intermediate_size", intermediate_size, multiples[1]),
    ):
        if size % multiple or not size:
            return (
                f"{name} of this rank is {size}, {format_name} needs a positive multiple of {multiple} "
                "(another --moe-backend or number of tensor-parallel ranks may fit)"
            )
    return None


def refuse_overlap(state: RunState, backend: MoeBackend) -> None:
    """Raise where overlap arguments would be ignored."""
    if state.overlap_args is not None:
        raise MoeConfigError(f"--moe-backend {backend} cannot overlap its kernels with other work: unset overlap args")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckCase:
    """One way in which a backend may run a layer, and what the self-check compares it with.

    quant_info: the layer, made to run this way whatever the number of tokens.
    quantize_input, tolerance: of the twin; see `Backend`.
    max_tokens: the most tokens that are run this way, None for any number.
    rows_at_one_expert: token counts to send to one expert in one call, because the kernels branch on that number.
    name: told where this way is wrong; empty if there is no other.
    """

    quant_info: Any
    quantize_input: ActivationQuant | None
    tolerance: float
    max_tokens: int | None = None
    rows_at_one_expert: tuple[int, ...] = ()
    name: str = ""


class LibraryTuning(Protocol):
    """Opens a context in which a kernel library tunes itself."""

    def __call__(self, cache_file: Path | None, *, measure: bool) -> AbstractContextManager[Any]:
        """Reads `cache_file`; with `measure`, calls inside are measured and the results written to the file."""


class Backend(ABC):
    """A kernel family. Instances hold no state.

    `archs`: by format, the devices its kernels run on. `transports`: those whose layouts it takes. `multiples`: by
    format, what hidden and intermediate size must be multiples of.
    `tolerance` is the relative error allowed against the twin, for the worst few tokens and block of 128 outputs. The
    default suits bf16 activations and results: 7e-3 is seen, a row of scales off by a factor of 2 gives 2e-2 and more.
    `package`: what must be importable for the kernels to run, None where torch is enough.
    `activation_quant` says, by weight format, how the kernels round their inputs; a format not named is not rounded.
    `compiles_tactics`: a tactic's first run compiles it, which several threads may do at once.
    `is_capturable`: a run on one rank has been seen to work in a CUDA graph.
    """

    hardware: ClassVar[str]
    package: ClassVar[str | None] = None
    archs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    transports: ClassVar[tuple[MoeA2ABackend, ...]] = (MoeA2ABackend.NONE,)
    multiples: ClassVar[Mapping[str, tuple[int, int]]] = {}
    tolerance: ClassVar[float] = 1.5e-2
    activation_quant: ClassVar[Mapping[str, ActivationQuant]] = {}
    routes_inside: ClassVar[bool] = False  # prefers router logits (BypassedTopK) to ids and weights
    compiles_tactics: ClassVar[bool] = False
    is_capturable: ClassVar[bool] = False

    def is_installed(self) -> bool:
        """True if `package` can be imported here; nothing is imported to find out."""
        return self.package is None or self.package in sys.modules or importlib.util.find_spec(self.package) is not None

    def lacks(self) -> str | None:
        """What this machine lacks to run the kernels on its GPU and how to get it, as the object of "needs"."""
        return None if self.package is None or self.is_installed() else not_installed(self.package)

    def supports(self, device: Device, format_name: str, a2a: MoeA2ABackend, config: MoeRunnerConfig) -> str | None:
        """None if this backend can run the path, else the reason why not: by its tables, then by what it refuses."""
        if format_name not in self.archs:
            return f"format {format_name} is not supported; it takes {', '.join(self.archs)}"
        if device.arch not in self.archs[format_name]:
            return f"{format_name} on {device.arch} is not supported; it runs on {', '.join(self.archs[format_name])}"
        if a2a not in self.transports:
            return f"transport {a2a} is not supported; use --moe-a2a-backend {', '.join(self.transports)}"
        return self.refuses_sizes(format_name, config) or self.refuses(config)

    @abstractmethod
    def prepare(self, experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> Any:
        """Process canonical weights into this backend's quant info, once, at load.

        Raises:
            WeightFormatError: the format or a size cannot be laid out for the kernel.
        """

    def layer_bytes(self, format_name: str, config: MoeRunnerConfig, device: Device, *, has_bias: bool) -> int:
        """Bytes of one layer's processed experts on a rank, known before any weight is read; here as stored."""
        del device
        bias_itemsize = config.dtype.itemsize if has_bias else 0
        sizes = (config.hidden_size, config.intermediate_size)
        return config.num_local_experts * expert_bytes(format_name, *sizes, bias_itemsize)

    def refuses_sizes(self, format_name: str, sizes: MoeRunnerConfig | ExpertWeights) -> str | None:
        """Reason why a rank's sizes cannot be tiled, or None."""
        if format_name not in self.multiples:
            return None
        return wrong_size(format_name, sizes.hidden_size, sizes.intermediate_size, self.multiples[format_name])

    def check_sizes(self, experts: ExpertWeights) -> None:
        """Raise WeightFormatError for experts whose sizes cannot be tiled."""
        reason = self.refuses_sizes(experts.format_name, experts)
        if reason:
            raise WeightFormatError(reason)

    def router_logits_dtype(self, format_name: str) -> torch.dtype:
        """What the gate hands out where `--router-logits-dtype` is unset; it accumulates in fp32 anyway."""
        del format_name
        return torch.float32

    def wants_ue8m0(self, device: torch.device) -> bool:
        """Whether tokens that arrive in FP8 must have power-of-two scales."""
        del device
        return False

    def dispatch_quantizer(self, quant_info: Any) -> Quantize | None:
        """What makes NVFP4 tokens for a transport that only sends them; None if this backend's transport does it."""
        del quant_info
        return None

    def tolerance_for(self, format_name: str, config: MoeRunnerConfig) -> float:
        """Tolerance of one path, for backends where it differs by format or dtype."""
        del format_name, config
        return self.tolerance

    def check_cases(
        self, quant_info: Any, format_name: str, config: MoeRunnerConfig, dispatch_format: DispatchFormat
    ) -> Sequence[CheckCase]:
        """Every way in which tokens of this layout may be run, fewest tokens first; the last takes any number."""
        del dispatch_format
        return [
            CheckCase(
                quant_info=quant_info,
                quantize_input=self.activation_quant.get(format_name),
                tolerance=self.tolerance_for(format_name, config),
            )
        ]

    def as_computed(self, experts: ExpertWeights, topology: Topology) -> ExpertWeights:
        """The canonical experts as the kernels see them, for the twin: most kernels see them as they are."""
        del topology
        return experts

    def tactics(
        self, quant_info: Any, config: MoeRunnerConfig, num_tokens: int, measured: Mapping[Tactic, float]
    ) -> Sequence[Tactic]:
        """What to measure next for so many tokens, the untuned way first; nothing more: empty.

        `measured`: seconds by tactic so far, infinite for one that does not run. The answer depends on nothing else, so
        that all ranks get the same.
        """
        del quant_info, config, num_tokens, measured
        return ()

    def with_choice(self, quant_info: Any, choice: TacticTable) -> Any:
        """The same weights, run with the chosen tactics.

        Raises:
            MoeConfigError: a text that names no tactic.
        """
        del quant_info
        raise MoeConfigError(f"{type(self).__name__} has no tactics, got {choice}")

    def library_tuning(self, quant_info: Any) -> LibraryTuning | None:
        """The library's own tuning, for kernels whose tactics it chooses and keeps; None for all others."""
        del quant_info
        return None

    def refuses(self, config: MoeRunnerConfig) -> str | None:
        """Reason why a setting would be ignored by this backend, or None."""
        if config.no_combine:
            return "no_combine is not supported: the kernel sums a token's experts itself"
        if config.apply_router_weight_on_input:
            return "apply_router_weight_on_input is not supported: router weights multiply the expert output"
        return None
