"""`deep_ep.Buffer` for ranks that are threads: same signatures, checks and garbage.

The library: 2.x at commit dd758ca (2026-07-14), deep_ep/buffers/legacy.py and csrc/legacy/buffer.hpp; 1.2.1 has the
same class. Punished as there:
- every received tensor is NaN until the hook ran, rows past the counts stay NaN, only two results live;
- every low-latency call takes the next half of a double buffer, counted on the host, needs its counters to be zero, and
  zeroes those of the other half. A call that was captured but never ran still counts, so the next one meets counters
  that nobody zeroed: the card waits for ever, this emulator refuses. A replay uses the halves of its capture;
- normal kernels leave the counters dirty, also for a replay; only `clean_low_latency_buffer`, on all ranks together,
  zeroes them, and captured it runs at replays alone;
- normal mode waits for counts on the host, so it cannot be captured.

`double_buffer.capturing()` stands for a CUDA graph capture of this rank. `wide` lets fp32 pass where the kernels take
bf16, so that a test can compare arithmetic without its roundings.
"""

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.emulators import layouts, numbers
from tests.emulators.double_buffer import DoubleBuffer, is_capturing
from tests.emulators.ranks import Rank
from tests.emulators.refusal import need

HIDDEN_SIZES = {2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192}
E4M3 = torch.float8_e4m3fn
NAN = float("nan")


class Config:
    """Chunk sizes; only its size hints matter here."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 256 * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 128 * hidden_bytes * num_ranks if num_ranks > 8 else 0


class Buffer:
    num_sms = 20
    wide = False

    def __init__(
        self, group: Rank, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
        num_qps_per_rank: int = 24, allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
        explicitly_destroy: bool = False, enable_shrink: bool = False, comm: Any = None,
    ) -> None:  # fmt: skip
        self.group, self.low_latency_mode = group, low_latency_mode
        self.num_nvl_bytes, self.num_rdma_bytes, self.num_qps = num_nvl_bytes, num_rdma_bytes, num_qps_per_rank
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.halves = DoubleBuffer(group)
        self.alive: list[list[torch.Tensor]] = []
        if low_latency_mode or group.size() > 8:  # only with NVSHMEM, as in the library
            self.nvshmem_qp_depth = int(os.environ.get("NVSHMEM_QP_DEPTH", "1024"))
            os.environ["NVSHMEM_QP_DEPTH"] = str(self.nvshmem_qp_depth)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        need(num_ranks in {2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160}, f"unsupported EP ranks: {num_ranks}")
        return Config()

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        tokens, scales = num_max_dispatch_tokens_per_rank, hidden // 128 * 4
        dispatch, combine = 16 + max(hidden * 2, hidden + scales), scales + hidden * 2
        send = max(tokens * dispatch, num_experts * tokens * combine)
        receive = num_experts * tokens * max(dispatch, combine)
        flags = (num_experts * 4 + 127) // 128 * 128
        return (2 * (send + receive + flags) + 128) // 128 * 128

    # ---- normal mode ----

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        need(topk_idx.dtype == torch.int64 and topk_idx.is_contiguous(), "topk_idx must be contiguous int64")
        num_ranks = self.group.size()
        owner = torch.where(topk_idx >= 0, topk_idx // (num_experts // num_ranks), -1)
        in_rank = torch.stack([(owner == rank).any(-1) for rank in range(num_ranks)], dim=-1)
        per_expert = torch.stack([(topk_idx == expert).sum() for expert in range(num_experts)]).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(
        self, x: Any, handle: Any = None, num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None, is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None, topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None, expert_alignment: int = 1, num_worst_tokens: int = 0,
        config: Any = None, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        data, scale = x if isinstance(x, tuple) else (x, None)
        need(self.num_nvl_bytes > 0, "the buffer was not sized for normal mode")
        need(topk_idx is not None and topk_weights is not None and num_tokens_per_expert is not None, "layout missing")
        need(not is_capturing(), "normal mode waits for counts on the host: a capture fails")
        self._check_rows(data, scale)
        need(topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape, "weights are fp32 [T, K]")
        need(topk_idx.dtype == torch.int64 and topk_idx.shape[1] <= 32, "topk_idx must be int64, of at most 32")
        self.calls.append(("dispatch", {"expert_alignment": expert_alignment, "dtype": data.dtype}))
        self.halves.soil()
        num_local = num_tokens_per_expert.numel() // self.group.size()
        first = self.group.rank() * num_local
        rows, codes, scales, ids, weights = [], [], [], [], []
        for rank, (sent, sent_scale, sent_ids, sent_weights) in enumerate(
            self.group.exchange((data, scale, topk_idx, topk_weights))
        ):
            mine = (sent_ids >= first) & (sent_ids < first + num_local)
            chosen = mine.any(-1).nonzero().flatten()
            rows += [(rank, int(token)) for token in chosen]
            codes.append(sent[chosen])
            scales += [] if sent_scale is None else [sent_scale[chosen]]
            ids.append(torch.where(mine, sent_ids - first, -1)[chosen])
            weights.append(sent_weights.masked_fill(~mine, 0.0)[chosen])
        result = torch.cat(codes) if scale is None else (torch.cat(codes), torch.cat(scales))
        local_ids = torch.cat(ids)
        counts = [int((local_ids == expert).sum()) for expert in range(num_local)]
        aligned = [-(-count // expert_alignment) * expert_alignment for count in counts]
        return result, local_ids, torch.cat(weights), aligned, (rows, data.shape[0]), None

    def _check_dtype(self, x: torch.Tensor) -> None:
        need(x.dtype == torch.bfloat16 or (self.wide and x.dtype == torch.float32), "x must be bf16")

    def _check_rows(self, data: torch.Tensor, scale: torch.Tensor | None) -> None:
        need(data.dim() == 2 and data.is_contiguous(), "x must be contiguous [T, H]")
        need(data.shape[1] * data.element_size() % 16 == 0, "rows move 16 bytes at a time")
        if scale is None:
            self._check_dtype(data)
        else:
            need(data.dtype == E4M3 and data.shape[1] % 128 == 0, "e4m3 rows of a multiple of 128")
            need(scale.dtype == torch.float32 and scale.shape == (data.shape[0], data.shape[1] // 128), "fp32 scales")

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None, bias: Any = None,
        config: Any = None, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        rows, num_tokens = handle
        need(x.shape[0] == len(rows), f"combine got {x.shape[0]} rows for {len(rows)} received ones")
        self._check_dtype(x)
        self.halves.soil()
        out = torch.zeros(num_tokens, x.shape[1])
        for sent, sent_rows in self.group.exchange((x, rows)):
            for row, (rank, token) in enumerate(sent_rows):
                if rank == self.group.rank():
                    out[token] += sent[row].float()
        return out if self.wide else out.to(x.dtype), None, None

    # ---- low latency ----

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        need(self.low_latency_mode, "not a low-latency buffer")
        self.calls.append(("clean", {}))
        self.halves.clean()

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
        cumulative_local_expert_recv_stats: Any = None, use_fp8: bool = True, round_scale: bool = False,
        use_ue8m0: bool = False, async_finish: bool = False, return_recv_hook: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        limit, num_ranks, hidden = num_max_dispatch_tokens_per_rank, self.group.size(), x.shape[1]
        self._check_low_latency(x, topk_idx, limit, num_experts, use_fp8)
        self.halves.take()
        need(use_fp8 or not (round_scale or use_ue8m0), "scale options without FP8")
        need(round_scale or not use_ue8m0, "use_ue8m0 needs round_scale")
        need(not (async_finish and return_recv_hook), "async_finish and return_recv_hook are exclusive")
        self.calls.append(("low_latency_dispatch", {"use_fp8": use_fp8, "use_ue8m0": use_ue8m0, "hidden": hidden}))
        num_local, num_rows = num_experts // num_ranks, num_ranks * limit
        first = self.group.rank() * num_local
        sources: list[list[tuple[int, int, int]]] = [[] for _ in range(num_local)]
        everybody = [] if is_capturing() else self.group.exchange((x, topk_idx))
        for rank, (_, sent_ids) in enumerate(everybody):
            for token, slot in ((sent_ids >= first) & (sent_ids < first + num_local)).nonzero().tolist():
                sources[int(sent_ids[token, slot]) - first].append((rank, token, slot))
        tensors = _empty_result(x.dtype, num_local, num_rows, hidden, use_fp8, use_ue8m0)
        counts = torch.full((num_local,), -(10**6), dtype=torch.int32)

        def receive() -> None:
            for expert, rows in enumerate(sources if everybody else []):
                counts[expert] = len(rows)
                if rows:
                    sent = torch.stack([everybody[rank][0][token] for rank, token, _ in rows])
                    _write(tensors, expert, sent, use_fp8, round_scale, use_ue8m0)

        self._keep(tensors)
        hook = _finish(receive, return_recv_hook)
        result = tuple(tensors) if use_fp8 else tensors[0]
        return result, counts, (sources, topk_idx, num_rows, hidden), None, hook

    def _check_low_latency(
        self, x: torch.Tensor, topk_idx: torch.Tensor, limit: int, num_experts: int, use_fp8: bool
    ) -> None:
        num_ranks, hidden = self.group.size(), x.shape[1]
        need(self.low_latency_mode and self.num_qps >= num_experts // num_ranks, "not a low-latency buffer")
        wanted = self.get_low_latency_rdma_size_hint(limit, hidden, num_ranks, num_experts)
        need(self.num_rdma_bytes >= wanted, "the buffer is too small")
        need(self.nvshmem_qp_depth >= (limit + 1) * 2, "the send queue is too short: the library asserts this")
        self._check_dtype(x)
        need(x.is_contiguous() and x.shape[0] <= limit <= 1024, "too many tokens, or x is not contiguous")
        need(hidden in HIDDEN_SIZES, f"unsupported hidden {hidden}")
        need(topk_idx.dtype == torch.int64 and topk_idx.is_contiguous() and topk_idx.shape[1] <= 11, "topk_idx")
        need(not use_fp8 or hidden % 512 == 0, "fp8 wants a multiple of 512")
        need(num_experts % num_ranks == 0 and num_ranks * limit % 4 == 0, "experts or scale pitch")

    def _keep(self, tensors: list[torch.Tensor]) -> None:
        """A double buffer: the third result overwrites the first."""
        self.alive.append(tensors)
        if len(self.alive) > 2:
            for tensor in self.alive.pop(0):
                _spoil(tensor)

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Any,
        use_logfmt: bool = False, zero_copy: bool = False, async_finish: bool = False,
        return_recv_hook: bool = False, out: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        sources, sent_ids, num_rows, hidden = handle
        need(x.shape == (len(sources), num_rows, hidden) and x.is_contiguous(), f"x is {tuple(x.shape)}")
        self._check_dtype(x)
        need(topk_idx.dtype == torch.int64 and torch.equal(topk_idx, sent_ids), "ids differ from the dispatched ones")
        need(topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape, "weights are fp32 [T, K]")
        self.calls.append(("low_latency_combine", {"address": x.data_ptr(), "hidden": x.shape[2]}))
        self.halves.take()
        everybody = [] if is_capturing() else self.group.exchange((x, sources))
        result = torch.full((topk_idx.shape[0], hidden), NAN, dtype=x.dtype)

        def receive() -> None:
            total = torch.zeros(result.shape)
            for sent, rows_of_expert in everybody:
                for expert, rows in enumerate(rows_of_expert):
                    for row, (rank, token, slot) in enumerate(rows):
                        if rank == self.group.rank():
                            total[token] += topk_weights[token, slot] * sent[expert, row].float()
            if everybody:
                result.copy_(total)

        return result, None, _finish(receive, return_recv_hook)


class Nvfp4Buffer(Buffer):
    """A build with the options `use_nvfp4` and `x_global_scale`."""

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
        use_fp8: bool = True, async_finish: bool = False, return_recv_hook: bool = False, use_nvfp4: bool = False,
        x_global_scale: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Received rows as codes (M, H/2, E) and scales (32, 4, M/128, 4, H/64, E), NaN scales past the counts."""
        need(not (use_fp8 and use_nvfp4), "one number format")
        plain, counts, handle, event, hook = super().low_latency_dispatch(
            x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, use_fp8=use_fp8, return_recv_hook=True
        )
        need(use_nvfp4 and x_global_scale is not None and x_global_scale.dtype == torch.float32, "x_global_scale")
        num_local, num_rows, hidden = plain.shape
        need(num_rows % 128 == 0 and hidden % 64 == 0, "whole blocks of scales")
        codes = torch.full((num_local, num_rows, hidden // 2), 0xFF, dtype=torch.uint8)
        flat = torch.full((num_local, num_rows * hidden // 16), 0x7F, dtype=torch.uint8)

        def receive() -> None:
            hook()
            for expert, count in enumerate(counts.tolist()):
                codes[expert, :count], scales = numbers.quantize_nvfp4(plain[expert, :count], x_global_scale)
                position = layouts.swizzle_position(num_rows, hidden // 16)[:count].flatten()
                flat[expert, position] = scales.view(torch.uint8).flatten()

        blocks = flat.view(num_local, num_rows // 128, hidden // 64, 32, 4, 4)
        result = codes.permute(1, 2, 0), blocks.permute(3, 4, 1, 5, 2, 0)
        return result, counts, handle, event, _finish(receive, return_recv_hook)


def _finish(receive: Callable[[], None], return_recv_hook: bool) -> Callable[[], None] | None:
    if return_recv_hook:
        return receive
    receive()
    return None


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.dtype == E4M3:
        tensor.view(torch.uint8).fill_(0x7F)
    elif tensor.dtype == torch.int32:
        tensor.fill_(-1)
    else:
        tensor.fill_(NAN)


def _empty_result(
    dtype: torch.dtype, num_experts: int, num_rows: int, hidden: int, use_fp8: bool, use_ue8m0: bool
) -> list[torch.Tensor]:
    if not use_fp8:
        tensors = [torch.empty(num_experts, num_rows, hidden, dtype=dtype)]
    else:
        columns, scale_dtype = (hidden // 512, torch.int32) if use_ue8m0 else (hidden // 128, torch.float32)
        scales = torch.empty(num_experts, columns, num_rows, dtype=scale_dtype).transpose(1, 2)  # M-major
        tensors = [torch.empty(num_experts, num_rows, hidden, dtype=E4M3), scales]
    for tensor in tensors:
        _spoil(tensor)
    return tensors


def _write(
    tensors: list[torch.Tensor], expert: int, sent: torch.Tensor, use_fp8: bool, round_scale: bool, use_ue8m0: bool
) -> None:
    num_rows = sent.shape[0]
    if not use_fp8:
        tensors[0][expert, :num_rows] = sent
        return
    groups = sent.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1).clamp(min=1e-4) / 448
    if round_scale:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    tensors[0][expert, :num_rows] = (groups / scale[..., None]).clamp(-448, 448).to(E4M3).flatten(-2)
    if use_ue8m0:
        octets = (torch.log2(scale).round() + 127).to(torch.int64).unflatten(-1, (-1, 4))
        scale = sum(octets[..., byte] << (8 * byte) for byte in range(4)).to(torch.int32)
    tensors[1][expert, :num_rows] = scale


def install_deepep(monkeypatch: pytest.MonkeyPatch, *, wide: bool = False, nvfp4: bool = False) -> type[Buffer]:
    """`import deep_ep` finds the emulator until the test ends; `nvfp4` for a build that can send it."""
    buffer_class = type("Buffer", (Nvfp4Buffer if nvfp4 else Buffer,), {"wide": wide})
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=buffer_class))
    monkeypatch.setattr("moe.dispatch.deepep.is_capturing", is_capturing)
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "")  # so that what the library writes there is undone
    monkeypatch.delenv("NVSHMEM_QP_DEPTH")
    return buffer_class
