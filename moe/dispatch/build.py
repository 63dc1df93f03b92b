"""From settings to dispatchers: what is checked at start without a library, and the transport built once per rank.

Every layer of a rank shares the transport's buffer; the dispatcher of a layer is thin.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from moe.config import DispatchFormat, MoeA2ABackend, MoeBackend
from moe.dispatch.base import Dispatcher
from moe.dispatch.deepep import DeepepBuffer, DeepepDispatcher
from moe.dispatch.deepep_settings import DeepepMode, DeepepSettings, EpShape, check_deepep
from moe.dispatch.flashinfer import FlashinferDispatcher, Quantize, build_alltoall
from moe.dispatch.mooncake import MooncakeBuffer
from moe.dispatch.mori import MoriBuffer, MoriDispatcher, MoriSettings
from moe.dispatch.nixl import NixlBuffer
from moe.dispatch.payload import Payload, choose_payload, expert_alignment
from moe.errors import MoeConfigError

_DEEPEP_BUFFERS: dict[MoeA2ABackend, type[DeepepBuffer]] = {
    MoeA2ABackend.DEEPEP: DeepepBuffer,
    MoeA2ABackend.MOONCAKE: MooncakeBuffer,
    MoeA2ABackend.NIXL: NixlBuffer,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportSettings:
    """Everything that decides how tokens travel. `max_num_tokens`: most tokens of one rank in one step.

    `ue8m0_scales`: DeepGEMM runs on SM100. `knows_input_scale`: the checkpoint has static NVFP4 input scales.
    """

    a2a: MoeA2ABackend
    backend: MoeBackend
    format_name: str
    shape: EpShape
    max_num_tokens: int
    deepep: DeepepSettings = field(default_factory=DeepepSettings)
    mori: MoriSettings = field(default_factory=MoriSettings)
    ue8m0_scales: bool = False
    knows_input_scale: bool = False

    def __post_init__(self) -> None:
        if self.a2a is MoeA2ABackend.NONE:
            raise MoeConfigError("--moe-a2a-backend none needs no transport: use moe.dispatch.standard")

    @property
    def dispatch_formats(self) -> tuple[DispatchFormat, ...]:
        """Layouts this deployment can produce; give it to `MoeRunner(dispatch_formats=...)`."""
        if self.a2a is MoeA2ABackend.DEEPEP:
            return self.deepep.mode.dispatch_formats
        if self.a2a is MoeA2ABackend.MORI:
            return (DispatchFormat.MORI_LL,) if self.mori.low_latency else (DispatchFormat.MORI_NORMAL,)
        return self.a2a.dispatch_formats

    def payload(self, *, can_send_nvfp4: bool) -> Payload:
        """What is sent; modes that can be mixed agree on it."""
        return choose_payload(
            self.backend,
            self.dispatch_formats[0],
            self.format_name,
            ue8m0_scales=self.ue8m0_scales,
            knows_input_scale=self.knows_input_scale,
            can_send_nvfp4=can_send_nvfp4,
        )

    def check(self) -> None:
        """Everything that settings alone can say, before a process group or a weight exists.

        Raises:
            UnsupportedPathError, MoeConfigError: a limit of the transport's kernels, with the flag and both numbers.
        """
        if self.a2a in _DEEPEP_BUFFERS:
            check_deepep(self.deepep, self.shape, sends_fp8=self.payload(can_send_nvfp4=False).is_fp8)
            if self.deepep.mode is DeepepMode.LOW_LATENCY and self.max_num_tokens > self.deepep.max_dispatch_tokens:
                raise MoeConfigError(
                    f"--deepep-max-dispatch-tokens is {self.deepep.max_dispatch_tokens}, but a step may have "
                    f"{self.max_num_tokens} tokens (--max-num-batched-tokens), and --deepep-mode low_latency has no "
                    "other way to send them"
                )
        elif self.a2a is MoeA2ABackend.MORI and self.max_num_tokens > self.mori.max_dispatch_tokens:
            raise MoeConfigError(
                f"mori's max_dispatch_tokens is {self.mori.max_dispatch_tokens}, but a step may have "
                f"{self.max_num_tokens} tokens (--max-num-batched-tokens)"
            )


class Transport:
    """One rank's transport: its buffer for all layers, and a dispatcher for each."""

    def __init__(self, settings: TransportSettings, group: Any) -> None:
        """Check, then build. `group` is the process group of the expert-parallel ranks."""
        settings.check()
        self._settings = settings
        self._rank: int = group.rank()
        shape = settings.shape
        if settings.a2a in _DEEPEP_BUFFERS:
            sends_fp8 = settings.payload(can_send_nvfp4=False).is_fp8
            self._shared: Any = _DEEPEP_BUFFERS[settings.a2a](group, settings.deepep, shape, sends_fp8=sends_fp8)
        elif settings.a2a is MoeA2ABackend.MORI:
            self._shared = MoriBuffer(group, settings.mori, shape, settings.payload(can_send_nvfp4=False))
        else:
            self._shared = build_alltoall(self._rank, shape, settings.max_num_tokens)

    def dispatcher(
        self, *, input_multiplier: torch.Tensor | None = None, quantize: Quantize | None = None
    ) -> Dispatcher[Any, Any]:
        """One layer's dispatcher. For NVFP4: DeepEP takes the reciprocal input scale, FlashInfer the quantizer."""
        settings = self._settings
        if settings.a2a in _DEEPEP_BUFFERS:
            can_send_nvfp4 = self._shared.can_send_nvfp4 and input_multiplier is not None
            return DeepepDispatcher(
                self._shared,
                settings.payload(can_send_nvfp4=can_send_nvfp4),
                expert_alignment=expert_alignment(settings.backend),
                input_multiplier=input_multiplier,
            )
        if settings.a2a is MoeA2ABackend.MORI:
            return MoriDispatcher(self._shared)
        return FlashinferDispatcher(self._shared, self._rank, settings.shape, settings.max_num_tokens, quantize)
