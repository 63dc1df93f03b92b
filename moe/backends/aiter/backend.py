"""aiter: AMD's fused experts on MI300 (gfx942) and MI350 (gfx950), in bf16, FP8 and MXFP4.

Plain SwiGLU without biases; in MXFP4 also GPT-OSS's clamped SwiGLU with biases (`gpt_oss.py`).

One runner core serves all transports; the permutes are in `permutes.py`. The kernel never gets an id of -1.
Shape letters: E global experts, L local experts, R rows, K top-k, H hidden, I intermediate.
"""

import enum
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from moe.backend import PLAIN_SWIGLU, Backend, DispatchContext, FormatSupport, matrices, refuse_overlap
from moe.backends.aiter.gpt_oss import ARGUMENTS, GPT_OSS, GptOssParts, padded_expert_bytes, prepare_gpt_oss
from moe.config import Activation, DispatchDtype, DispatchFormat, MoeA2ABackend, MoeBackend, MoeRunnerConfig
from moe.device import Device, rocm_arch
from moe.errors import MoeConfigError, UnsupportedPathError, WeightFormatError
from moe.formats import (
    Bf16Weight,
    ExpertWeights,
    Fp8BlockWeight,
    Fp8TensorWeight,
    Mxfp4Weight,
    Weight,
    activation_quant,
)
from moe.formats.fp8 import FNUZ, FNUZ_FACTOR, device_e4m3, to_fnuz
from moe.formats.per_tensor import spread_rows
from moe.formats.token_groups import dequantize_token_groups
from moe.layouts.aiter import mark_shuffled, shuffle_e8m0, shuffle_weight
from moe.registry import register_backend, register_runner_core
from moe.topology import Topology
from moe.types import RunState

NAME = MoeBackend.AITER
BOTH_ARCHS = ("gfx942", "gfx950")
# Tolerances for the worst token and block: bf16 inside the kernel moves some activations to the next step of the second
# quantizer. With emulated rounding the error is 0.04 for FP8 and 0.2 for MXFP4, whose steps are up to half a value.
FORMATS = MappingProxyType({
    "bf16": FormatSupport(archs=BOTH_ARCHS, multiples=(32, 32)),
    "fp8_block": FormatSupport(
        archs=BOTH_ARCHS, multiples=(128, 128), activation_quant=activation_quant.fp8_groups, tolerance=8e-2
    ),
    "fp8_tensor": FormatSupport(
        archs=BOTH_ARCHS, multiples=(32, 32), activation_quant=activation_quant.fp8_tokens, tolerance=8e-2
    ),
    "mxfp4": FormatSupport(
        archs=("gfx950",),  # MI300 has no FP4 multiplier
        multiples=(256, 256), activations=(*PLAIN_SWIGLU, GPT_OSS), activation_quant=activation_quant.mxfp4_groups,
        tolerance=3e-1,
    ),
})  # fmt: skip
# With GPT-OSS's activation, sizes are padded and biases are added. The library keeps activations in bf16 for few rows
# and rounds them to FP8 for many; the reference does not round. With emulated FP8 the error of a layer is 0.06.
GPT_OSS_MXFP4 = replace(FORMATS["mxfp4"], multiples=None, takes_biases=True, activation_quant=None, tolerance=1.2e-1)


class AiterQuant(enum.StrEnum):
    """Members of aiter's QuantType, by name."""

    NO = "No"
    PER_TOKEN = "per_Token"
    PER_128X128 = "per_128x128"
    PER_1X32 = "per_1x32"


class Arrival(enum.Enum):
    """Number format in which tokens reach the experts."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"


_OWN_QUANT = {
    "fp8_block": AiterQuant.PER_128X128,
    "fp8_tensor": AiterQuant.PER_TOKEN,
    "mxfp4": AiterQuant.PER_1X32,
}
_MATCHING_ARRIVAL = {"fp8_block": Arrival.FP8, "mxfp4": Arrival.FP4}


def resolve_quant(format_name: str, arrival: Arrival) -> tuple[AiterQuant, bool]:
    """(quantization that the kernel runs, whether tokens are dequantized to bf16 first).

    Quantized weights decide, and tokens in another format are dequantized. With bf16 weights the tokens decide.
    """
    if format_name == "bf16":
        by_tokens = {
            Arrival.BF16: AiterQuant.NO, Arrival.FP8: AiterQuant.PER_128X128, Arrival.FP4: AiterQuant.PER_1X32,
        }  # fmt: skip
        return by_tokens[arrival], False
    upcast = arrival is not Arrival.BF16 and arrival is not _MATCHING_ARRIVAL.get(format_name)
    return _OWN_QUANT[format_name], upcast


@dataclass(frozen=True, kw_only=True, slots=True)
class AiterKernel:
    """The fused kernel of the installed release and its enums, imported once at load."""

    fused_moe: Callable[..., torch.Tensor]
    quant_types: object
    silu: object
    swiglu: object

    @classmethod
    def resolve(cls, arguments: frozenset[str] = frozenset()) -> "AiterKernel":
        """Import the package. `arguments` are those that only this path needs.

        Raises:
            UnsupportedPathError: the installed release lacks an argument that is needed.
        """
        library = importlib.import_module("aiter")
        fused_moe = importlib.import_module("aiter.fused_moe").fused_moe
        known = inspect.signature(fused_moe).parameters
        missing = {"expert_mask", "num_local_tokens", "dtype", "a1_scale"} | arguments
        missing -= set(known)
        if missing:
            raise UnsupportedPathError(
                f"--moe-backend {NAME}: the installed aiter is too old, fused_moe has no {', '.join(sorted(missing))}"
            )
        activations = library.ActivationType
        return cls(
            fused_moe=fused_moe, quant_types=library.QuantType, silu=activations.Silu, swiglu=activations.Swiglu
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class AiterMoeQuantInfo:
    """Shuffled weights [L, 2I, H] and [L, H, I] (packed for MXFP4), [gate; up]; scales in the kernel's form."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    format_name: str
    global_mask: torch.Tensor | None  # int32 [E + 1]: 1 for own experts; None where this rank owns all
    local_mask: torch.Tensor  # int32 [L + 1]: the same for ids that are local already
    kernel: AiterKernel
    topology: Topology
    gpt_oss: GptOssParts | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AiterCoreInput:
    """Rows [R, H] with their scales if quantized, int32 ids [R, K] in the id space of `mask`, fp32 weights [R, K].

    With a mask, ids and weights have an extra column, [R, K + 1], without an expert (see `permutes.py`). Only the first
    `num_rows` (int32 [1]) rows are real; all of them if it is None.
    """

    x_RH: torch.Tensor
    scale: torch.Tensor | None
    ids_RK: torch.Tensor
    weights_RK: torch.Tensor
    mask: torch.Tensor | None
    num_rows: torch.Tensor | None = None


@register_backend
class AiterBackend(Backend[AiterMoeQuantInfo]):
    """AMD GPUs."""

    name = NAME
    auto_order = 60
    package = "aiter"
    hardware = "gfx942 (MI300), gfx950 (MI350)"
    formats = FORMATS
    transports = tuple(transport for transport in MoeA2ABackend if transport.supports_aiter)

    def format_support(self, format_name: str, config: MoeRunnerConfig) -> FormatSupport | None:
        """MXFP4 has different kernels for each activation."""
        is_gpt_oss = _is_gpt_oss(format_name, config.activation)
        return GPT_OSS_MXFP4 if is_gpt_oss else super().format_support(format_name, config)

    def arch_of(self, device: torch.device) -> str | None:
        """As ROCm names it."""
        return rocm_arch(device)

    def dispatch_dtype(self, context: DispatchContext) -> DispatchDtype:
        """FP8 with mori and FP8 block weights, because the GEMM reads the same groups of 128 columns."""
        is_mori = context.dispatch_format in (DispatchFormat.MORI_NORMAL, DispatchFormat.MORI_LL)
        return DispatchDtype.FP8 if is_mori and context.format_name == "fp8_block" else DispatchDtype.BF16

    def layer_bytes(self, format_name: str, config: MoeRunnerConfig, device: Device) -> int:
        """The stored size, except for GPT-OSS, whose sizes are padded."""
        if not _is_gpt_oss(format_name, config.activation):
            return super().layer_bytes(format_name, config, device)
        sizes = (config.hidden_size, config.intermediate_size)
        return config.num_local_experts * padded_expert_bytes(*sizes, has_bias=config.has_biases)

    def lay_out(self, experts: ExpertWeights, config: MoeRunnerConfig, topology: Topology) -> AiterMoeQuantInfo:
        """Shuffle weights and scales; on gfx942, convert FP8 to AMD's older variant.

        Raises:
            UnsupportedPathError: the installed release is too old.
        """
        is_gpt_oss = _is_gpt_oss(experts.format_name, config.activation)
        kernel = AiterKernel.resolve(ARGUMENTS if is_gpt_oss else frozenset())
        parts = None
        data: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]
        if is_gpt_oss:
            laid_out = prepare_gpt_oss(experts, *matrices(experts, Mxfp4Weight, topology.device), topology)
            data, parts = (laid_out.w13, laid_out.w13_scale, laid_out.w2, laid_out.w2_scale), laid_out.parts
        else:
            is_fnuz = device_e4m3(topology.device) is FNUZ
            data = (
                *_processed(experts.w13.to(topology.device), is_fnuz=is_fnuz),
                *_processed(experts.w2.to(topology.device), is_fnuz=is_fnuz),
            )
        owned = topology.expert_range(config.num_experts)
        return AiterMoeQuantInfo(
            w13=data[0], w13_scale=data[1], w2=data[2], w2_scale=data[3], format_name=experts.format_name,
            global_mask=None if topology.ep_size == 1 else expert_mask(config.num_experts, owned, topology.device),
            local_mask=expert_mask(len(owned), range(len(owned)), topology.device),
            kernel=kernel, topology=topology, gpt_oss=parts,
        )  # fmt: skip


def _is_gpt_oss(format_name: str, activation: Activation) -> bool:
    return format_name == "mxfp4" and activation == GPT_OSS


def expert_mask(num_ids: int, owned: range, device: torch.device) -> torch.Tensor:
    """int32 [num_ids + 1]: 1 for the experts on this rank. The extra last id is the sink, which is always masked.

    The kernel takes the number of ids from the mask's length, so the sink is a valid id. Masked ids cost nothing.
    """
    mask = torch.zeros(num_ids + 1, dtype=torch.int32, device=device)
    mask[owned.start : owned.stop] = 1
    return mask


def _processed(weight: Weight, *, is_fnuz: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(weight, Bf16Weight):
        return shuffle_weight(weight.data.to(torch.bfloat16)), None
    if isinstance(weight, Mxfp4Weight):
        packed = mark_shuffled(shuffle_weight(weight.codes).view(torch.float4_e2m1fn_x2))
        return packed, shuffle_e8m0(weight.scales.flatten(0, 1))
    if isinstance(weight, Fp8BlockWeight):
        codes, scale = weight.data, weight.scale_inv.contiguous()
    elif isinstance(weight, Fp8TensorWeight):
        num_rows = weight.shape[-2]
        codes, scale = weight.data, spread_rows(weight.scale, weight.shape).expand(-1, num_rows, 1).contiguous()
    else:
        raise WeightFormatError(f"{NAME} takes {', '.join(FORMATS)} experts, got {weight.format_name}")
    if is_fnuz:
        codes, scale = to_fnuz(codes), scale * FNUZ_FACTOR
    return shuffle_weight(codes), scale


@register_runner_core(NAME)
class AiterRunnerCore:
    """One fused kernel from rows and ids to the weighted sum."""

    def __init__(self, config: MoeRunnerConfig) -> None:
        self.config = config

    def run(self, core_input: AiterCoreInput, quant_info: AiterMoeQuantInfo, state: RunState) -> torch.Tensor:
        """[R, H] in bf16: each row's weighted sum over the local experts, zero where it has none."""
        refuse_overlap(state, NAME)
        arrival = _arrival(core_input.x_RH)
        quant, upcast = resolve_quant(quant_info.format_name, arrival)
        x_RH, scale = core_input.x_RH, core_input.scale
        if upcast:
            x_RH, scale = _to_bf16(x_RH, scale, arrival), None
        elif x_RH.dtype == torch.float8_e4m3fn and quant_info.w13.dtype == FNUZ and scale is not None:
            x_RH, scale = to_fnuz(x_RH), scale * FNUZ_FACTOR
        parts = quant_info.gpt_oss
        try:
            out_RH = self._call(x_RH if parts is None else parts.pad(x_RH), scale, quant, core_input, quant_info)
        except NotImplementedError as error:  # the shape is tuned for kernels whose sorting takes no mask
            raise UnsupportedPathError(
                f"--moe-backend {NAME}: {error}; set AITER_BYPASS_TUNE_CONFIG=1 in the environment, so that aiter "
                "skips its tuned kernels, or use another backend"
            ) from error
        return out_RH if parts is None else parts.unpad(out_RH)

    def _call(
        self,
        x_RH: torch.Tensor,
        scale: torch.Tensor | None,
        quant: AiterQuant,
        core_input: AiterCoreInput,
        quant_info: AiterMoeQuantInfo,
    ) -> torch.Tensor:
        parts, kernel = quant_info.gpt_oss, quant_info.kernel
        return kernel.fused_moe(
            x_RH, quant_info.w13, quant_info.w2, core_input.weights_RK, core_input.ids_RK,
            expert_mask=core_input.mask,
            activation=kernel.silu if parts is None else kernel.swiglu,
            quant_type=getattr(kernel.quant_types, quant),
            w1_scale=quant_info.w13_scale,
            w2_scale=quant_info.w2_scale,
            a1_scale=scale,
            num_local_tokens=core_input.num_rows,
            dtype=self.config.dtype,
            **({} if parts is None else parts.arguments()),
        )  # fmt: skip


def _arrival(x: torch.Tensor) -> Arrival:
    if x.dtype in (torch.float8_e4m3fn, FNUZ):
        return Arrival.FP8
    return Arrival.FP4 if x.dtype == torch.uint8 else Arrival.BF16


def _to_bf16(x: torch.Tensor, scale: torch.Tensor | None, arrival: Arrival) -> torch.Tensor:
    if scale is None:
        raise MoeConfigError(f"--moe-backend {NAME} got {arrival.value} tokens without their scales")
    if arrival is Arrival.FP8:
        return dequantize_token_groups(x, scale).to(torch.bfloat16)
    return Mxfp4Weight(x, scale).dequantize(torch.bfloat16)
