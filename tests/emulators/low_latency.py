"""Mooncake's and NIXL's buffers: DeepEP's low-latency kernels under other names, with other ways to be built.

Mooncake: commit 3b5a594 (2026-08-22), mooncake-wheel/mooncake/mooncake_ep_buffer.py; it has no scale options.
NIXL: commit 8770b65 (2026-08-21), examples/device/ep/nixl_ep/buffer.py; `dispatch` and `combine` are other names of
`low_latency_dispatch` and `low_latency_combine` that hide their options behind `*args, **kwargs`.
Neither can clean its buffer.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.emulators.deepep import Buffer
from tests.emulators.ranks import Rank
from tests.emulators.refusal import need


def _inner(group: Rank, num_bytes: int, wide: bool) -> Buffer:
    kind = type("Buffer", (Buffer,), {"wide": wide})
    return kind(group, 0, num_bytes, low_latency_mode=True, num_qps_per_rank=10**6)


class MooncakeBuffer:
    wide = False

    def __init__(self, group: Rank, num_ep_buffer_bytes: int = 0, disable_p2p: bool = False) -> None:
        self.inner = _inner(group, num_ep_buffer_bytes, self.wide)

    get_ep_buffer_size_hint = staticmethod(Buffer.get_low_latency_rdma_size_hint)

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, active_ranks: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int, num_experts: int, timeout_us: int, use_fp8: bool | None = None,
        async_finish: bool = False, return_recv_hook: bool = False,
    ) -> Any:  # fmt: skip
        need(use_fp8 is not None, "the default of use_fp8 depends on the build")
        need(active_ranks.dtype == torch.int32 and active_ranks.tolist() == [1] * self.inner.group.size(), "active")
        need(timeout_us == -1, "a time-out marks a slow rank as dead")
        return self.inner.low_latency_dispatch(
            x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, use_fp8=use_fp8,
            async_finish=async_finish, return_recv_hook=return_recv_hook,
        )  # fmt: skip

    def combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, active_ranks: torch.Tensor,
        timeout_us: int, handle: Any, zero_copy: bool = False, async_finish: bool = False,
        return_recv_hook: bool = False, out: torch.Tensor | None = None,
    ) -> Any:  # fmt: skip
        need(active_ranks.tolist() == [1] * self.inner.group.size() and timeout_us == -1, "active ranks, time-out")
        return self.inner.low_latency_combine(x, topk_idx, topk_weights, handle, return_recv_hook=return_recv_hook)


class NixlBuffer:
    wide = False

    def __init__(
        self, disable_ll_nvlink: bool = False, explicitly_destroy: bool = False, rank: int = 0,
        low_latency_mode: bool = True, group: Rank | None = None, comm: Any = None, tcp_store_group: Any = None,
        timeout_ms: int = 30_000,
    ) -> None:  # fmt: skip
        need(rank == group.rank(), "rank and group differ")
        self.group, self.connected = group, {rank}
        self.inner: Buffer | None = None

    get_rdma_size_hint = staticmethod(Buffer.get_low_latency_rdma_size_hint)

    def update_memory_buffers(
        self, num_ranks: int, num_experts_per_rank: int, num_rdma_bytes: int, num_nvl_bytes: int = 0
    ) -> None:
        need(num_ranks == self.group.size(), "ranks")
        self.inner = _inner(self.group, num_rdma_bytes, self.wide)

    def connect_ranks(self, remote_ranks: list[int], activate: bool = True) -> None:
        need(bool(remote_ranks), "an empty list of ranks")
        self.connected |= set(remote_ranks)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        return self.low_latency_dispatch(*args, **kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        return self.low_latency_combine(*args, **kwargs)

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
        cumulative_local_expert_recv_stats: Any = None, dispatch_wait_recv_cost_stats: Any = None,
        use_fp8: bool = True, round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> Any:  # fmt: skip
        need(len(self.connected) == self.group.size(), "a rank is not connected")
        return self.inner.low_latency_dispatch(
            x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, None, use_fp8, round_scale, use_ue8m0,
            async_finish, return_recv_hook,
        )  # fmt: skip

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Any,
        use_logfmt: bool = False, zero_copy: bool = False, async_finish: bool = False,
        return_recv_hook: bool = False, out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: Any = None,
    ) -> Any:  # fmt: skip
        return self.inner.low_latency_combine(x, topk_idx, topk_weights, handle, return_recv_hook=return_recv_hook)


def install_low_latency(monkeypatch: pytest.MonkeyPatch, *, wide: bool = False) -> None:
    """`mooncake.mooncake_ep_buffer` and `nixl_ep` are found until the test ends."""
    for module, original in (("mooncake.mooncake_ep_buffer", MooncakeBuffer), ("nixl_ep", NixlBuffer)):
        buffer_class = type("Buffer", (original,), {"wide": wide})
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(Buffer=buffer_class))
    monkeypatch.setitem(sys.modules, "mooncake", SimpleNamespace())
