"""NIXL's expert-parallel buffer behind DeepEP's low-latency calls; everything else is in `deepep`."""

from typing import TYPE_CHECKING

from moe.config import MoeA2ABackend
from moe.dispatch.base import load_library
from moe.dispatch.deepep import DeepepBuffer
from moe.dispatch.deepep_settings import ll_hidden_size
from moe.dispatch.mooncake import LowLatencyLibrary, need_low_latency

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class NixlBuffer(DeepepBuffer):
    """Low latency only; `DeepepDispatcher` works on it as on DeepEP's."""

    transport = MoeA2ABackend.NIXL
    can_clean = False

    def build(self, group: "ProcessGroup") -> "_Adapter":
        """The library's buffer, connected to all other ranks, behind DeepEP's names."""
        need_low_latency(self)
        buffer_class = load_library("nixl_ep", self.transport).Buffer
        shape, rank = self.shape, group.rank()
        buffer = buffer_class(rank=rank, group=group)
        num_bytes = buffer_class.get_rdma_size_hint(
            self.settings.max_dispatch_tokens, ll_hidden_size(shape.hidden_size), shape.ep_size, shape.num_experts
        )
        buffer.update_memory_buffers(shape.ep_size, shape.num_local_experts, num_bytes)
        others = [other for other in range(shape.ep_size) if other != rank]
        if others:
            buffer.connect_ranks(others)
        return _Adapter(buffer)


class _Adapter:
    """The library's two calls under DeepEP's names. Their signatures match already.

    Newer releases use DeepEP's names too, and their `dispatch` and `combine` hide the options behind `**kwargs`.
    """

    def __init__(self, buffer: LowLatencyLibrary) -> None:
        self.low_latency_dispatch = getattr(buffer, "low_latency_dispatch", buffer.dispatch)
        self.low_latency_combine = getattr(buffer, "low_latency_combine", buffer.combine)
