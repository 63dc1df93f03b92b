"""The transport of a rank, chosen by `--moe-a2a-backend`. Built before the weights; makes a dispatcher for each layer.

A transport holds what all layers share (a buffer, a process group). What differs by layer (dispatch dtype, static input
scale) is an argument of `dispatcher`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from moe.config import DispatchDtype, DispatchFormat, MoeA2ABackend, MoeRunnerConfig
from moe.device import num_processors
from moe.dispatch.base import AnyDispatcher
from moe.dispatch.beside_gemm import CombineBesideGemm
from moe.dispatch.deepep import DeepepBuffer, DeepepDispatcher
from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings, EpShape
from moe.dispatch.flashinfer import FlashinferDispatcher, build_alltoall
from moe.dispatch.gathered import GatheredDispatcher
from moe.dispatch.mooncake import MooncakeBuffer
from moe.dispatch.mori import MoriBuffer, MoriDispatcher, MoriSettings
from moe.dispatch.nixl import NixlBuffer
from moe.dispatch.standard import Reduce, StandardDispatcher
from moe.errors import MoeConfigError
from moe.formats.fp8 import E4M3, device_e4m3
from moe.group import SINGLE_RANK, Group, TorchGroup
from moe.overlap import SideStream, SignalKind
from moe.topology import Topology
from moe.types import Quantize

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SMS = 132  # where an emulated library runs on a CPU
_LOW_LATENCY_BUFFERS = {
    MoeA2ABackend.DEEPEP: DeepepBuffer,
    MoeA2ABackend.MOONCAKE: MooncakeBuffer,
    MoeA2ABackend.NIXL: NixlBuffer,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchSpec:
    """How one layer's tokens are dispatched. `input_scale` is the layer's static one; for the others see `Backend`.

    `signals`: what the experts' second GEMM signals, where the combine runs beside it.
    """

    dispatch_dtype: DispatchDtype
    expert_alignment: int = 1
    input_scale: float | None = None
    quantize: Quantize | None = None
    signals: SignalKind | None = None


class Transport(Protocol):
    """The transport of one rank."""

    @property
    def can_send_nvfp4(self) -> bool:
        """Whether tokens may travel as NVFP4."""

    def dispatcher(self, layer: DispatchSpec) -> AnyDispatcher:
        """Dispatch and combine of one layer."""


def dispatch_formats(a2a: MoeA2ABackend, mode: DeepepMode) -> tuple[DispatchFormat, ...]:
    """Layouts that the transport sends in this mode. mori sends `mori_ll` in mode `low_latency` only."""
    if a2a is MoeA2ABackend.DEEPEP:
        return mode.dispatch_formats
    if a2a is MoeA2ABackend.MORI:
        return (DispatchFormat.MORI_LL if mode is DeepepMode.LOW_LATENCY else DispatchFormat.MORI_NORMAL,)
    return a2a.dispatch_formats


def build_transport(
    topology: Topology,
    config: MoeRunnerConfig,
    *,
    group: "ProcessGroup | None",
    settings: DeepepSettings,
    dispatch_dtypes: set[DispatchDtype],
    row_multiple: int = 4,
    tp: Group = SINGLE_RANK,
    dp: Group = SINGLE_RANK,
) -> Transport:
    """The transport of `topology.a2a`. `dispatch_dtypes` are those of all layers, `row_multiple` is the largest that a
    backend needs, and `group` has the ranks that share the experts. The ranks of `tp` have the same tokens, those of
    `dp` different ones; where there is one of `dp`, all ranks of `group` have the same.

    Raises:
        MoeConfigError, UnsupportedPathError: the settings break a limit of the library, or the library or the process
            group is missing. Nothing has been allocated then.
    """
    a2a = topology.a2a
    if group is None:
        if a2a is MoeA2ABackend.NONE and not topology.is_partial:
            return StandardTransport(None)
        raise MoeConfigError(
            f"--moe-a2a-backend {a2a} on tp_size {topology.tp_size} x ep_size {topology.ep_size} needs a process group "
            "of these ranks, but this process runs alone"
        )
    if group.size() != topology.num_ranks:
        raise MoeConfigError(
            f"tp_size {topology.tp_size} x ep_size {topology.ep_size} are {topology.num_ranks} ranks, but the process "
            f"group has {group.size()}"
        )
    if a2a is MoeA2ABackend.NONE:
        if dp.size > 1:
            return GatheredTransport(dp, tp)
        whole_layers = tp if tp.size > 1 else None
        reduce = tp.all_reduce if whole_layers is not None else sum_over(group)
        reduce_parts = reduce if topology.is_partial else None
        return StandardTransport(reduce_parts, is_capturable=tp.is_capturable, group=whole_layers)
    max_num_tokens = config.max_num_tokens
    shape = EpShape.of(config)
    if a2a is MoeA2ABackend.FLASHINFER:
        return FlashinferTransport(group, shape, max_num_tokens)
    if a2a is MoeA2ABackend.MORI:
        if len(dispatch_dtypes) != 1:
            raise MoeConfigError(
                f"--moe-a2a-backend mori sends one number format, but layers want {sorted(dispatch_dtypes)}"
            )
        is_low_latency = settings.mode is DeepepMode.LOW_LATENCY
        mori = MoriSettings(low_latency=is_low_latency, max_dispatch_tokens=max_num_tokens)
        dispatch_dtype = next(iter(dispatch_dtypes))
        fp8_dtype = device_e4m3(topology.device) if dispatch_dtype.is_fp8 else E4M3
        return MoriTransport(MoriBuffer(group, mori, shape, dispatch_dtype, fp8_dtype=fp8_dtype))
    if settings.mode is DeepepMode.LOW_LATENCY and max_num_tokens > settings.max_dispatch_tokens:
        raise MoeConfigError(
            f"--deepep-max-dispatch-tokens is {settings.max_dispatch_tokens}, but a step may have {max_num_tokens} "
            "tokens: raise it or lower --max-num-batched-tokens"
        )
    sends_fp8 = any(dispatch_dtype.is_fp8 for dispatch_dtype in dispatch_dtypes)
    buffer = _LOW_LATENCY_BUFFERS[a2a](group, settings, shape, sends_fp8=sends_fp8, row_multiple=row_multiple)
    return DeepepTransport(buffer, topology.device)


def sum_over(group: "ProcessGroup") -> Reduce:
    """Sum [T, H] over a torch process group, in place."""
    return TorchGroup(group).all_reduce


class StandardTransport:
    """Transport `none`: sends nothing, and reduces partial sums."""

    can_send_nvfp4 = False

    def __init__(self, reduce: Reduce | None, *, is_capturable: bool = True, group: Group | None = None) -> None:
        self._dispatcher = StandardDispatcher(reduce, is_capturable=is_capturable, group=group)

    def dispatcher(self, layer: DispatchSpec) -> StandardDispatcher:
        """The same for every layer."""
        del layer
        return self._dispatcher


class GatheredTransport:
    """Transport `none` for ranks with tokens of their own."""

    can_send_nvfp4 = False

    def __init__(self, dp: Group, tp: Group) -> None:
        self._dispatcher = GatheredDispatcher(dp, tp)

    def dispatcher(self, layer: DispatchSpec) -> GatheredDispatcher:
        """The same for every layer."""
        del layer
        return self._dispatcher


class DeepepTransport:
    """DeepEP's buffer, or another library's behind the same calls."""

    def __init__(self, buffer: DeepepBuffer, device: torch.device) -> None:
        self._buffer = buffer
        self._device = device
        self._side = SideStream(device)

    @property
    def can_send_nvfp4(self) -> bool:
        """True in low latency, if the build has the option."""
        return self._buffer.settings.mode is DeepepMode.LOW_LATENCY and self._buffer.can_send_nvfp4

    def dispatcher(self, layer: DispatchSpec) -> DeepepDispatcher:
        """Over the shared buffer."""
        multiplier = None if layer.input_scale is None else torch.tensor([1.0 / layer.input_scale], device=self._device)
        return DeepepDispatcher(
            self._buffer,
            layer.dispatch_dtype,
            expert_alignment=layer.expert_alignment,
            input_multiplier=multiplier,
            beside_gemm=self._beside_gemm(layer.signals),
        )

    def _beside_gemm(self, signals: SignalKind | None) -> CombineBesideGemm | None:
        if signals is None:
            return None
        combine = self._buffer.raw.low_latency_combine
        return CombineBesideGemm(
            combine, signals, self._buffer.shape.hidden_size, self._side, num_processors(self._device, _SMS)
        )


class MoriTransport:
    """mori's operator; all layers send one number format."""

    can_send_nvfp4 = False

    def __init__(self, buffer: MoriBuffer) -> None:
        self._buffer = buffer

    def dispatcher(self, layer: DispatchSpec) -> MoriDispatcher:
        """Over the shared operator."""
        del layer
        return MoriDispatcher(self._buffer)


class FlashinferTransport:
    """FlashInfer's all-to-all."""

    can_send_nvfp4 = True

    def __init__(self, group: "ProcessGroup", shape: EpShape, max_tokens: int) -> None:
        self._rank, self._shape, self._max_tokens = group.rank(), shape, max_tokens
        self._alltoall = build_alltoall(group, shape, max_tokens)

    def dispatcher(self, layer: DispatchSpec) -> FlashinferDispatcher:
        """Over the shared all-to-all. The backend's quantizer makes NVFP4 tokens."""
        quantize = layer.quantize if layer.dispatch_dtype is DispatchDtype.NVFP4 else None
        return FlashinferDispatcher(self._alltoall, self._rank, self._shape, self._max_tokens, quantize)
