"""DeepGEMM: grouped FP8 GEMMs with 128x128 weight blocks and a scale per token and 128 columns. SM90 and SM100.

The runner core has two layouts, masked (rows per expert, counts on the device) and contiguous (segments of 128 rows);
the permutes are in `permutes.py`. Weights stay [gate; up] as loaded.
Shape letters: E local experts, M rows per expert, R rows, H hidden, I intermediate.
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType

import torch

from moe.backend import Backend, DispatchContext, FormatSupport, matrices, refuse_overlap
from moe.config import DispatchDtype, DispatchFormat, MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.device import cuda_arch
from moe.errors import UnsupportedPathError
from moe.formats import ExpertWeights, Fp8BlockWeight
from moe.formats.fp8_block import BLOCK
from moe.layouts.deep_gemm import (
    Swiglu,
    power_of_two_weight,
    rounded_activations,
    swiglu_reference,
    weight_scales,
)
from moe.overlap import DownGemmOverlap, SignalKind, takes
from moe.packages import not_installed
from moe.registry import register_backend, register_runner_core
from moe.topology import Topology
from moe.types import RunState

NAME = MoeBackend.DEEP_GEMM
SEGMENT = 128  # in the contiguous layout, the rows of an expert's segment are a multiple of this
RESULT_DTYPE = torch.bfloat16  # the kernels write nothing else
ARCHS = ("sm90", "sm100", "sm103")
# Newest name first.
MASKED_NAMES = (
    "m_grouped_fp8_gemm_nt_masked",
    "fp8_m_grouped_gemm_nt_masked",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
)
CONTIGUOUS_NAMES = ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepGemmKernels:
    """The two grouped GEMMs of the installed release, looked up by name at load, and the activation between them."""

    masked: Callable[..., object]
    contiguous: Callable[..., object]
    swiglu: Swiglu
    get_num_sms: Callable[[], int] | None = None
    set_num_sms: Callable[[int], None] | None = None

    @classmethod
    def resolve(cls, device: torch.device) -> "DeepGemmKernels":
        """Import the package, and on a GPU our own kernel.

        Raises:
            UnsupportedPathError: it has neither of the known names; or Triton is missing.
        """
        library = importlib.import_module("deep_gemm")
        return cls(
            masked=_first_of(library, MASKED_NAMES), contiguous=_first_of(library, CONTIGUOUS_NAMES),
            swiglu=_swiglu_for(device), get_num_sms=getattr(library, "get_num_sms", None),
            set_num_sms=getattr(library, "set_num_sms", None),
        )  # fmt: skip

    def limits(self) -> tuple[Callable[[], int], Callable[[int], None]]:
        """The library's functions that read and set the processors of a GEMM, of a release that can also signal.

        Raises:
            UnsupportedPathError: the installed release cannot.
        """
        if self.get_num_sms is None or self.set_num_sms is None or not takes(self.masked, "enable_overlap", "signal"):
            raise UnsupportedPathError(
                f"--moe-backend {NAME}: the masked GEMM of the installed deep_gemm has no arguments enable_overlap and "
                "signal: install a release that has them, or leave enable_single_batch_overlap off"
            )
        return self.get_num_sms, self.set_num_sms

    def masked_beside_combine(self, overlap: DownGemmOverlap, *arguments: object) -> None:
        """The masked GEMM on some of the processors; it signals each tile of rows that is written."""
        get_num_sms, set_num_sms = self.limits()
        num_sms = get_num_sms()
        set_num_sms(overlap.num_sms)
        try:
            overlap.start()
            tiles = self.masked(*arguments, enable_overlap=True, signal=overlap.signals)
        finally:
            set_num_sms(num_sms)
        if not isinstance(tiles, tuple):
            raise UnsupportedPathError(f"--moe-backend {NAME}: the masked GEMM did not say how large its tiles are")
        overlap.block_m, overlap.threshold = tiles


def _swiglu_for(device: torch.device) -> Swiglu:
    if device.type != "cuda":
        return swiglu_reference
    try:
        found: Swiglu = importlib.import_module("moe.kernels.masked_swiglu").masked_swiglu
    except ImportError as error:
        raise UnsupportedPathError(f"--moe-backend {NAME} needs {not_installed('triton')}") from error
    return found


def _first_of(library: ModuleType, names: tuple[str, ...]) -> Callable[..., object]:
    for name in names:
        if hasattr(library, name):
            found: Callable[..., object] = getattr(library, name)
            return found
    raise UnsupportedPathError(f"--moe-backend {NAME}: the installed deep_gemm has none of {', '.join(names)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepGemmMoeQuantInfo:
    """e4m3 weights [E, 2I, H] and [E, H, I] with their scales in the kernel's form (see `moe.layouts.deep_gemm`)."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    ue8m0: bool  # scales are powers of two: SM100
    kernels: DeepGemmKernels
    topology: Topology


@dataclass(frozen=True, slots=True)
class MaskedInput:
    """e4m3 [E, M, H] and scales; only the first `masked_m[e]` rows are real. `expected_m` is a hint."""

    x: torch.Tensor
    scale: torch.Tensor
    masked_m: torch.Tensor
    expected_m: int


@dataclass(frozen=True, slots=True)
class ContiguousInput:
    """e4m3 [R, H] and scales; `m_indices` int32 [R] is the expert of every row, padding rows included."""

    x: torch.Tensor
    scale: torch.Tensor
    m_indices: torch.Tensor


@register_backend
class DeepGemmBackend(Backend[DeepGemmMoeQuantInfo]):
    """FP8 block experts with dynamically quantized activations."""

    name = NAME
    auto_order = 40
    package = "deep_gemm"
    hardware = "SM90 (Hopper), SM100/SM103 (Blackwell)"
    formats = MappingProxyType({
        "fp8_block": FormatSupport(
            archs=ARCHS, multiples=(BLOCK, BLOCK), activations=None, activation_quant=rounded_activations,
            # bf16 between the GEMMs moves some activations to the next FP8 step: 0.07 is seen for the worst token
            tolerance=8e-2,
        )
    })  # fmt: skip
    transports = (MoeA2ABackend.NONE, MoeA2ABackend.DEEPEP, MoeA2ABackend.MOONCAKE, MoeA2ABackend.NIXL)
    expert_alignment = SEGMENT
    can_move_experts = True

    def arch_of(self, device: torch.device) -> str | None:
        """By compute capability."""
        return cuda_arch(device)

    def dispatch_dtype(self, context: DispatchContext) -> DispatchDtype:
        """FP8 from any transport, with power-of-two scales on SM100."""
        if context.dispatch_format is DispatchFormat.STANDARD:
            return DispatchDtype.BF16
        return DispatchDtype.FP8_UE8M0 if _wants_ue8m0(context.device) else DispatchDtype.FP8

    def as_computed(self, experts: ExpertWeights, topology: Topology) -> ExpertWeights:
        """On SM100, the weights with power-of-two scales."""
        if not _wants_ue8m0(topology.device):
            return experts
        w13, w2 = matrices(experts, Fp8BlockWeight, topology.device)
        return dataclasses.replace(experts, w13=power_of_two_weight(w13), w2=power_of_two_weight(w2))

    def lay_out(self, experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> DeepGemmMoeQuantInfo:
        """SM90 takes weights as loaded; on SM100 their block scales become powers of two."""
        kernels = DeepGemmKernels.resolve(topology.device)
        ue8m0 = _wants_ue8m0(topology.device)
        w13, w2 = matrices(experts, Fp8BlockWeight, topology.device)
        if ue8m0:
            w13, w2 = power_of_two_weight(w13), power_of_two_weight(w2)
        return DeepGemmMoeQuantInfo(
            w13=w13.data.contiguous(), w13_scale=weight_scales(w13, ue8m0=ue8m0),
            w2=w2.data.contiguous(), w2_scale=weight_scales(w2, ue8m0=ue8m0),
            ue8m0=ue8m0, kernels=kernels, topology=topology,
        )  # fmt: skip

    def signal_kind(self, arch: str) -> SignalKind | None:
        """Only the kernel for SM90 signals."""
        return SignalKind.TILES if arch == "sm90" else None

    def check_signals(self, quant_info: DeepGemmMoeQuantInfo) -> None:
        """Few releases can."""
        quant_info.kernels.limits()

    def expert_stacks(self, quant_info: DeepGemmMoeQuantInfo) -> Sequence[torch.Tensor]:
        """Weights and their scales."""
        return [quant_info.w13, quant_info.w13_scale, quant_info.w2, quant_info.w2_scale]


def _wants_ue8m0(device: torch.device) -> bool:
    return cuda_arch(device).startswith("sm10")


@register_runner_core(NAME)
class DeepGemmRunnerCore:
    """GEMM, activation and quantization, GEMM. Router weights are not applied here."""

    def __init__(self, config: MoeRunnerConfig) -> None:
        self.config = config

    def run(
        self, core_input: MaskedInput | ContiguousInput, quant_info: DeepGemmMoeQuantInfo, state: RunState
    ) -> torch.Tensor:
        """[E, M, H] or [R, H] in bf16; rows that are not real hold garbage."""
        overlap = state.overlap_args
        if not isinstance(core_input, MaskedInput) or not isinstance(overlap, DownGemmOverlap):
            refuse_overlap(state, NAME)
        rest: tuple[object, ...]
        rows, device = core_input.x.shape[:-1], core_input.x.device
        num_both, hidden_size = quant_info.w13.shape[1:]
        h = torch.empty((*rows, num_both), dtype=RESULT_DTYPE, device=device)
        if isinstance(core_input, MaskedInput):
            kernel, rest = quant_info.kernels.masked, (core_input.masked_m, core_input.expected_m)
            h_EMF, counts_E = h, core_input.masked_m
        else:  # one run of rows, all of which are computed
            kernel, rest = quant_info.kernels.contiguous, (core_input.m_indices,)
            h_EMF, counts_E = h[None], torch.full((1,), rows[0], dtype=torch.int32, device=device)
        kernel((core_input.x, core_input.scale), (quant_info.w13, quant_info.w13_scale), h, *rest)
        mid, mid_scale = quant_info.kernels.swiglu(h_EMF, counts_E, self.config.activation, ue8m0=quant_info.ue8m0)
        if h.dim() == 2:
            mid, mid_scale = mid[0], mid_scale[0]
        out = torch.empty((*rows, hidden_size), dtype=RESULT_DTYPE, device=device)
        down = ((mid, mid_scale), (quant_info.w2, quant_info.w2_scale), out, *rest)
        if isinstance(overlap, DownGemmOverlap):
            quant_info.kernels.masked_beside_combine(overlap, *down)
        else:
            kernel(*down)
        return out
