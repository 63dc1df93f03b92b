"""NIXL's expert-parallel buffer in the shape of DeepEP's low-latency one; everything else is `deepep`."""

from typing import Any

from moe.config import MoeA2ABackend
from moe.dispatch.base import load_library
from moe.dispatch.deepep import DeepepBuffer
from moe.dispatch.deepep_settings import ll_hidden_size
from moe.dispatch.mooncake import need_low_latency


class NixlBuffer(DeepepBuffer):
    """Low latency only; `DeepepDispatcher` works on it as on DeepEP's."""

    transport = MoeA2ABackend.NIXL
    can_clean = False

    def build(self, group: Any) -> Any:
        """The library's buffer, connected to all other ranks, behind DeepEP's names."""
        need_low_latency(self)
        buffer_class = load_library("nixl_ep", self.transport).Buffer
        shape, rank = self.shape, group.rank()
        buffer = buffer_class(rank=rank, group=group)
        num_bytes = buffer_class.get_rdma_size_hint(
            self.settings.max_dispatch_tokens, ll_hidden_size(shape.hidden_size), shape.ep_size, shape.num_experts
        )
        buffer.update_memory_buffers(shape.ep_size, shape.num_local_experts, num_bytes)
        buffer.connect_ranks([other for other in range(shape.ep_size) if other != rank])
        return _Adapter(buffer)


class _Adapter:
    """The two calls under DeepEP's names; their signatures are DeepEP's already.

    Newer releases use these names too, and their `dispatch` and `combine` hide the options behind `**kwargs`.
    """

    def __init__(self, buffer: Any) -> None:
        self.low_latency_dispatch = getattr(buffer, "low_latency_dispatch", buffer.dispatch)
        self.low_latency_combine = getattr(buffer, "low_latency_combine", buffer.combine)
