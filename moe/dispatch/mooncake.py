"""Mooncake's expert-parallel buffer behind DeepEP's low-latency calls; everything else is in `deepep`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from moe.config import MoeA2ABackend
from moe.dispatch.base import load_library
from moe.dispatch.deepep import DeepepBuffer
from moe.dispatch.deepep_settings import DeepepMode, ll_hidden_size
from moe.errors import UnsupportedPathError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NO_TIMEOUT = -1  # the engine's heartbeat deals with ranks that never answer


class MooncakeBuffer(DeepepBuffer):
    """Low latency only; `DeepepDispatcher` works on it as on DeepEP's."""

    transport = MoeA2ABackend.MOONCAKE
    can_clean = False

    def build(self, group: "ProcessGroup") -> "_Adapter":
        """The library's buffer behind DeepEP's names."""
        need_low_latency(self)
        buffer_class = load_library("mooncake.mooncake_ep_buffer", self.transport).Buffer
        shape = self.shape
        num_bytes = buffer_class.get_ep_buffer_size_hint(
            self.settings.max_dispatch_tokens, ll_hidden_size(shape.hidden_size), shape.ep_size, shape.num_experts
        )
        return _Adapter(buffer_class(group, num_bytes), shape.ep_size)


class LowLatencyLibrary(Protocol):
    """A library's buffer with DeepEP's two calls under shorter names."""

    @property
    def dispatch(self) -> Callable[..., tuple[object, ...]]:
        """As `low_latency_dispatch`."""

    @property
    def combine(self) -> Callable[..., tuple[object, ...]]:
        """As `low_latency_combine`."""


class _Adapter:
    def __init__(self, buffer: LowLatencyLibrary, num_ranks: int) -> None:
        self._buffer = buffer
        self._num_ranks = num_ranks
        self._active_ranks: torch.Tensor | None = None

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool = True,
        return_recv_hook: bool = False,
    ) -> tuple[object, ...]:
        """As DeepEP's; this library has no scale options."""
        if self._active_ranks is None:  # the kernel reads and writes it on the tokens' device
            self._active_ranks = torch.ones(self._num_ranks, dtype=torch.int32, device=x.device)
        return self._buffer.dispatch(
            x, topk_idx, self._active_ranks, num_max_dispatch_tokens_per_rank, num_experts, NO_TIMEOUT,
            use_fp8=use_fp8, return_recv_hook=return_recv_hook,
        )  # fmt: skip

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: object,
        return_recv_hook: bool = False,
    ) -> tuple[object, ...]:
        """As DeepEP's."""
        return self._buffer.combine(
            x, topk_idx, topk_weights, self._active_ranks, NO_TIMEOUT, handle, return_recv_hook=return_recv_hook
        )


def need_low_latency(buffer: DeepepBuffer) -> None:
    """Refuse modes that a low-latency library lacks."""
    if buffer.settings.mode is not DeepepMode.LOW_LATENCY:
        raise UnsupportedPathError(
            f"--moe-a2a-backend {buffer.transport} has low-latency kernels only: use --deepep-mode low_latency, "
            f"not {buffer.settings.mode}"
        )
