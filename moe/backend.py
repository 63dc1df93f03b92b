"""The backend interface: a backend declares what its kernels support and converts canonical weights for them.

Facts about one backend belong in its own module. Selection, self-check, tuning and transports use this interface only.
"""

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar, final

import torch

from moe.config import (
    Activation,
    DispatchDtype,
    DispatchFormat,
    MoeA2ABackend,
    MoeBackend,
    MoeRunnerConfig,
)
from moe.device import Device, arch_of
from moe.errors import MoeConfigError, UnsupportedPathError, WeightFormatError
from moe.formats import ExpertWeights, Weight
from moe.formats.activation_quant import ActivationQuant
from moe.formats.sizes import expert_bytes
from moe.overlap import SignalKind
from moe.packages import not_installed
from moe.topology import Topology, check_fit
from moe.types import MoeQuantInfo, Quantize, RunState

Tactic = str
TacticTable = dict[str, Tactic]  # number of tokens, as text, to the tactic for up to that many
Info = TypeVar("Info", bound=MoeQuantInfo)
W = TypeVar("W", bound=Weight)

# The largest relative error allowed against the reference, in any token group and block of 128 outputs. It suits bf16
# activations and results: correct kernels reach 7e-3, and one row of scales off by a factor of 2 gives 2e-2 or more.
BF16_TOLERANCE = 1.5e-2
PLAIN_SWIGLU = (Activation(),)


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatSupport:
    """What a backend's kernels support in one number format.

    archs: the devices they run on; None for any.
    multiples: a rank's hidden and intermediate size must be positive multiples of these; None for any size.
    activations: the ones they compute; None for any.
    activation_quant: how they quantize the inputs of both GEMMs; None if they do not.
    tolerance: the relative error that the self-check allows.
    """

    archs: tuple[str, ...] | None = None
    multiples: tuple[int, int] | None = None
    takes_biases: bool = False
    activations: tuple[Activation, ...] | None = PLAIN_SWIGLU
    activation_quant: ActivationQuant | None = None
    tolerance: float = BF16_TOLERANCE

    def takes(self, activation: Activation) -> bool:
        """Whether the kernels compute this activation."""
        return self.activations is None or activation in self.activations


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchContext:
    """What the number format of dispatched tokens depends on. `format_name` is that of the weights.

    knows_input_scale: the checkpoint has the static NVFP4 scale. can_send_nvfp4: the transport has the option.
    """

    dispatch_format: DispatchFormat
    format_name: str
    device: torch.device
    knows_input_scale: bool = False
    can_send_nvfp4: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckCase:
    """One code path through a backend's kernels, and how the self-check compares it with the reference.

    quant_info: the layer, forced onto this code path for any number of tokens.
    quantize_input: how the reference quantizes its inputs; None if it does not. tolerance: the relative error allowed.
    max_tokens: the most tokens that take this path; None for no limit.
    rows_at_one_expert: token counts to send to one expert in one call, because the kernels branch on that number.
    name: shown in the error if this case fails; empty if the backend has only one case.
    """

    quant_info: MoeQuantInfo
    quantize_input: ActivationQuant | None
    tolerance: float
    max_tokens: int | None = None
    rows_at_one_expert: tuple[int, ...] = ()
    name: str = ""


class LibraryTuning(Protocol):
    """Opens a context in which a kernel library tunes itself."""

    def __call__(self, cache_file: Path | None, *, measure: bool) -> AbstractContextManager[object]:
        """Read `cache_file`; with `measure`, also measure the calls made inside and write the results to the file."""


class Backend(ABC, Generic[Info]):
    """A kernel family. Instances hold no state. `Info` is the type of its quant info: one layer's processed weights.

    name: its member of `MoeBackend`.
    auto_order: its rank in `auto` among backends without measurements, lowest first.
    hardware: where it runs, as text for people.
    package: the package that the kernels need (`moe.packages` says where to get it); None for torch.
    formats: what the kernels support, by number format.
    transports: the ones whose layouts it accepts. tunable_with: the ones its tactics can be tuned with.
    dtypes: the dtypes it computes in; None for any.
    routes_inside: the kernel routes, so it prefers router logits (BypassedTopK) to ids and weights.
    expert_alignment: DeepEP's normal mode rounds each expert's row count up to a multiple of this.
    row_multiple: the rows per expert in low latency (ranks times token limit) must be a multiple of this.
    compiles_tactics: the first run of a tactic compiles it, and several threads may compile at once.
    is_capturable: a run on one rank has been captured in a CUDA graph and worked.
    can_move_experts: `expert_parts` and `put_expert` work, so that ranks can exchange experts while they serve.
    """

    name: ClassVar[MoeBackend]
    auto_order: ClassVar[int]
    hardware: ClassVar[str]
    package: ClassVar[str | None] = None
    formats: ClassVar[Mapping[str, FormatSupport]]
    transports: ClassVar[tuple[MoeA2ABackend, ...]] = (MoeA2ABackend.NONE,)
    tunable_with: ClassVar[tuple[MoeA2ABackend, ...]] = ()
    dtypes: ClassVar[tuple[torch.dtype, ...] | None] = (torch.bfloat16,)
    routes_inside: ClassVar[bool] = False
    expert_alignment: ClassVar[int] = 1
    row_multiple: ClassVar[int] = 4
    compiles_tactics: ClassVar[bool] = False
    is_capturable: ClassVar[bool] = False
    can_move_experts: ClassVar[bool] = False

    # ---- what can run ----

    @final
    def supports(self, device: Device, format_name: str, a2a: MoeA2ABackend, config: MoeRunnerConfig) -> str | None:
        """None if this backend can run the path, else the reason why not. Needs neither weights nor the package."""
        support = self.format_support(format_name, config)
        if support is None:
            return f"format {format_name} is not supported; it takes {', '.join(self.formats)}"
        sizes = (config.hidden_size, config.intermediate_size)
        return (
            self.unsupported_arch(device.arch, format_name, support)
            or self._unsupported_transport(a2a)
            or _unsupported_weights(support, format_name, sizes, config.has_biases)
            or _unsupported_activation(support, format_name, config.activation)
            or self.unsupported_reason(config)
        )

    def format_support(self, format_name: str, config: MoeRunnerConfig) -> FormatSupport | None:
        """What the kernels support for experts of this format; None if they do not support it.

        Override it if the answer depends on the layer.
        """
        del config
        return self.formats.get(format_name)

    @final
    def known_format(self, format_name: str, config: MoeRunnerConfig) -> FormatSupport:
        """`format_support`, for a format that the kernels must support.

        Raises:
            WeightFormatError: they do not support it.
        """
        support = self.format_support(format_name, config)
        if support is None:
            raise WeightFormatError(f"{self.name} takes {', '.join(self.formats)} experts, got {format_name}")
        return support

    def unsupported_arch(self, arch: str, format_name: str, support: FormatSupport) -> str | None:
        """Reason why the kernels do not run on an architecture, or None."""
        if support.archs is None or arch in support.archs:
            return None
        return f"{format_name} on {arch} is not supported; it runs on {', '.join(support.archs)}"

    def _unsupported_transport(self, a2a: MoeA2ABackend) -> str | None:
        if a2a in self.transports:
            return None
        return f"transport {a2a} is not supported; use --moe-a2a-backend {', '.join(self.transports)}"

    def unsupported_reason(self, config: MoeRunnerConfig) -> str | None:
        """Why this backend cannot honour a setting, in any number format; None if it honours them all."""
        if not any(support.takes(config.activation) for support in self.formats.values()):
            return f"only plain SwiGLU is supported, not {config.activation}"
        if self.dtypes is not None and config.dtype not in self.dtypes:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            return f"dtype {config.dtype} is not supported: the kernels take and give {known}"
        if config.no_combine:
            return "no_combine is not supported: the kernel sums a token's experts itself"
        if config.apply_router_weight_on_input:
            return "apply_router_weight_on_input is not supported: router weights multiply the expert output"
        return None

    @final
    def is_installed(self) -> bool:
        """True if `package` can be imported here. Checks without importing it."""
        if self.package is None:
            return True
        if self.package in sys.modules:
            return sys.modules[self.package] is not None
        return importlib.util.find_spec(self.package) is not None

    def missing_package(self) -> str | None:
        """The package that `prepare` needs and how to get it, worded to follow "needs"; None if it is installed."""
        return None if self.package is None or self.is_installed() else not_installed(self.package)

    def lacks(self) -> str | None:
        """What this machine lacks to run the kernels (a package, a compiler), worded to follow "needs", or None."""
        return self.missing_package()

    # ---- weights ----

    @final
    def prepare(self, experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> Info:
        """Process canonical weights into this backend's quant info, once, at load.

        Raises:
            MoeConfigError: weights, settings and topology belong to different layers or ranks.
            UnsupportedPathError: a package is missing, or the kernels do not support the device, activation or setting.
            WeightFormatError: the kernels do not support the number format, the biases or the sizes.
        """
        check_fit(experts, config, topology)
        name = experts.format_name
        config = replace(config, has_biases=experts.b13 is not None)
        support = self.known_format(name, config)
        sizes = (experts.hidden_size, experts.intermediate_size)
        wrong_weights = _unsupported_weights(support, name, sizes, config.has_biases)
        if wrong_weights is not None:
            raise WeightFormatError(f"--moe-backend {self.name}: {wrong_weights}")
        wrong_layer = _unsupported_activation(support, name, config.activation) or self.unsupported_reason(config)
        if wrong_layer is not None:
            raise UnsupportedPathError(f"--moe-backend {self.name}: {wrong_layer}")
        missing = self.missing_package()
        if missing is not None:
            raise UnsupportedPathError(f"--moe-backend {self.name} needs {missing}")
        arch = self.arch_of(topology.device)
        wrong_arch = None if arch is None else self.unsupported_arch(arch, name, support)
        if wrong_arch is not None:
            raise UnsupportedPathError(f"--moe-backend {self.name}: {wrong_arch}")
        return self.lay_out(experts, config, topology)

    @abstractmethod
    def lay_out(self, experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> Info:
        """The part of `prepare` after its checks: convert the weights to the kernels' layout, on `topology.device`."""

    def layer_bytes(self, format_name: str, config: MoeRunnerConfig, device: Device) -> int:
        """Bytes of one layer's processed experts on a rank, without reading weights. Default: the stored size."""
        del device
        bias_itemsize = config.dtype.itemsize if config.has_biases else 0
        sizes = (config.hidden_size, config.intermediate_size)
        return config.num_local_experts * expert_bytes(format_name, *sizes, bias_itemsize)

    def arch_of(self, device: torch.device) -> str | None:
        """Architecture of a device of this machine; None if `prepare` need not check it."""
        return arch_of(device)

    def as_computed(self, experts: ExpertWeights, topology: Topology) -> ExpertWeights:
        """The weights that the reference must use: `experts`, with any lossy change that the layout makes."""
        del topology
        return experts

    def check_cases(
        self, quant_info: Info, format_name: str, config: MoeRunnerConfig, dispatch_format: DispatchFormat
    ) -> Sequence[CheckCase]:
        """One case per code path for tokens of this layout, ascending by `max_tokens`; the last has no limit."""
        del dispatch_format
        support = self.known_format(format_name, config)
        return [
            CheckCase(
                quant_info=quant_info, quantize_input=support.activation_quant, tolerance=support.tolerance
            )
        ]  # fmt: skip

    def signal_kind(self, arch: str) -> SignalKind | None:
        """What the second GEMM of DeepEP's low-latency layout can signal to a combine beside it; None if nothing."""
        del arch
        return None

    def check_signals(self, quant_info: Info) -> None:
        """Raise UnsupportedPathError if the installed library cannot signal, although the kernels here could."""
        del quant_info

    # ---- tokens ----

    def router_logits_dtype(self, format_name: str) -> torch.dtype:
        """Dtype of the gate's output if `--router-logits-dtype` is unset. The gate always accumulates in fp32."""
        del format_name
        return torch.float32

    def dispatch_dtype(self, context: DispatchContext) -> DispatchDtype:
        """Number format in which a transport sends tokens; bf16 if the kernels would only dequantize them."""
        del context
        return DispatchDtype.BF16

    def dispatch_quantizer(self, quant_info: Info) -> Quantize | None:
        """Quantizes tokens to NVFP4 for a transport that cannot; None if the transport quantizes them itself."""
        del quant_info
        return None

    # ---- experts that move between ranks ----

    def expert_stacks(self, quant_info: Info) -> Sequence[torch.Tensor]:
        """Every tensor that differs between local experts; their axis 0 counts these."""
        raise UnsupportedPathError(
            f"--moe-backend {self.name} cannot exchange processed experts between ranks: leave enable_eplb off"
        )

    def expert_parts(self, quant_info: Info, expert: int) -> list[torch.Tensor]:
        """What one local expert consists of, as `put_expert` of another rank takes it; views where possible.

        Raises:
            UnsupportedPathError: not `can_move_experts`.
        """
        return [stack[expert] for stack in self.expert_stacks(quant_info)]

    def put_expert(self, quant_info: Info, expert: int, parts: Sequence[torch.Tensor]) -> None:
        """Make local expert `expert` the one of these parts, in place: captured graphs hold the addresses."""
        for stack, part in zip(self.expert_stacks(quant_info), parts, strict=True):
            stack[expert].copy_(part)

    # ---- tuning ----

    def tactics(
        self, quant_info: Info, config: MoeRunnerConfig, num_tokens: int, measured: Mapping[Tactic, float]
    ) -> Sequence[Tactic]:
        """Tactics to measure next for `num_tokens` tokens, the untuned one first; empty when there are no more.

        `measured`: seconds by tactic so far, infinite for a tactic that does not run. The result must depend on the
        arguments alone, so that all ranks get the same tactics.
        """
        del quant_info, config, num_tokens, measured
        return ()

    def with_choice(self, quant_info: Info, choice: TacticTable) -> Info:
        """The same weights, run with the chosen tactics.

        Raises:
            MoeConfigError: an entry of `choice` is not a tactic.
        """
        del quant_info
        raise MoeConfigError(f"{type(self).__name__} has no tactics, got {choice}")

    def library_tuning(self, quant_info: Info) -> LibraryTuning | None:
        """The library's own autotuner, if the library chooses the tactics; else None."""
        del quant_info
        return None


def _unsupported_weights(
    support: FormatSupport, format_name: str, sizes: tuple[int, int], has_biases: bool
) -> str | None:
    """Why the kernels do not support a rank's weights, or None. `sizes`: hidden and intermediate."""
    if has_biases and not support.takes_biases:
        return f"{format_name} experts with biases are not supported"
    if support.multiples is None:
        return None
    for name, size, multiple in zip(("hidden_size", "intermediate_size"), sizes, support.multiples, strict=True):
        if size % multiple or not size:
            return (
                f"{name} of this rank is {size}, {format_name} needs a positive multiple of {multiple} "
                "(another --moe-backend or number of tensor-parallel ranks may fit)"
            )
    return None


def _unsupported_activation(support: FormatSupport, format_name: str, activation: Activation) -> str | None:
    if support.activations is None or support.takes(activation):
        return None
    known = ["plain SwiGLU" if known.is_plain else str(known) for known in support.activations]
    return f"{activation} is not supported for {format_name}, only {' or '.join(known)}"


def matrices(experts: ExpertWeights, kind: type[W], device: torch.device) -> tuple[W, W]:
    """(w13, w2) on `device`, typed as weights of format `kind`.

    Raises:
        WeightFormatError: the experts have another format.
    """
    w13, w2 = experts.w13, experts.w2
    if not isinstance(w13, kind) or not isinstance(w2, kind):
        raise WeightFormatError(f"{kind.format_name} experts are needed, got {experts.format_name}")
    return w13.to(device), w2.to(device)


def refuse_overlap(state: RunState, backend: MoeBackend) -> None:
    """Raise if overlap arguments are set, for kernels that would ignore them."""
    if state.overlap_args is not None:
        raise MoeConfigError(f"--moe-backend {backend} cannot overlap its kernels with other work: unset overlap args")
