"""`mori.ops` for ranks that are threads: a token travels once per rank, ids stay global, the rest of the buffer is
garbage. The split kernels (AsyncLL) give nothing readable before the receiving call.

The library: ROCm/mori at commit 624002c (2026-08-21), python/mori/ops/dispatch_combine.py and src/ops/kernels. Kernels
are found by the input's dtype, and of the two FP8 variants only the GPU's own is compiled.
"""

import enum
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.emulators.device import pretend_rocm
from tests.emulators.ranks import this_rank
from tests.emulators.refusal import need

GARBAGE_ID = 10**6


class EpDispatchCombineKernelType(enum.Enum):
    IntraNode = 0
    InterNodeV1 = 1
    InterNodeV1LL = 2
    AsyncLL = 3


@dataclass
class EpDispatchCombineConfig:
    data_type: torch.dtype
    rank: int
    world_size: int
    hidden_dim: int
    scale_dim: int
    scale_type_size: int
    max_token_type_size: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    kernel_type: EpDispatchCombineKernelType = EpDispatchCombineKernelType.IntraNode
    gpu_per_node: int = 8


def _spoil(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0x80 if tensor.dtype == torch.float8_e4m3fnuz else 0x7F)
    else:
        tensor.fill_(GARBAGE_ID if tensor.dtype == torch.int32 else float("nan"))
    return tensor


class EpDispatchCombineOp:
    wide = False
    arch = "gfx950"

    def __init__(self, config: EpDispatchCombineConfig) -> None:
        self.config, self.group = config, this_rank()
        need(config.rank == self.group.rank() and config.world_size == self.group.size(), "rank or world size")
        need(config.kernel_type.name != "IntraNode" or config.world_size <= config.gpu_per_node, "one node")
        self.pending: list[Any] = []

    def _need_split(self, is_split: bool) -> None:
        need(is_split == (self.config.kernel_type.name == "AsyncLL"), "AsyncLL, and it alone, sends and receives apart")

    def dispatch(
        self, input: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor | None, indices: torch.Tensor,
        block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1,
    ) -> tuple[Any, ...]:  # fmt: skip
        self._need_split(False)
        result = self._dispatch(input, weights, scales, indices)
        self.pending.pop()()
        return result

    def dispatch_send(
        self, input: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor | None, indices: torch.Tensor
    ) -> tuple[Any, ...]:
        self._need_split(True)
        return self._dispatch(input, weights, scales, indices)

    def dispatch_recv(self, block_num: int = -1, warp_per_block: int = -1) -> None:
        self.pending.pop()()

    combine_recv = dispatch_recv

    def _dispatch(self, x: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor) -> Any:
        """The buffers, which get what was sent when `pending` is called."""
        config = self.config
        need(x.shape[1] == config.hidden_dim and x.is_contiguous(), "input")
        own_fp8 = torch.float8_e4m3fnuz if self.arch == "gfx942" else torch.float8_e4m3fn
        need(x.dtype in (torch.bfloat16, torch.float32, own_fp8), f"no kernel for {x.dtype} on {self.arch}")
        need(x.shape[0] <= config.max_num_inp_token_per_rank, "too many tokens")
        need(ids.dtype == torch.int32 and ids.shape == (x.shape[0], config.num_experts_per_token), "indices")
        need(weights.dtype == torch.float32 and weights.shape == ids.shape, "weights")
        need(bool((ids >= 0).all()), "every id is a destination: -1 is none")
        need((scales is not None) == (config.scale_dim > 0), "scales and scale_dim")
        if scales is not None:
            need(scales.shape == (x.shape[0], config.scale_dim), "scale shape")
            need(scales.element_size() == config.scale_type_size, "scale type size")
        capacity = config.world_size * config.max_num_inp_token_per_rank
        out = [
            _spoil(torch.empty(capacity, x.shape[1], dtype=x.dtype)),
            _spoil(torch.empty(capacity, ids.shape[1])),
            None if scales is None else _spoil(torch.empty(capacity, config.scale_dim)),
            _spoil(torch.empty(capacity, ids.shape[1], dtype=torch.int32)),
            torch.full((1,), GARBAGE_ID, dtype=torch.int32),
        ]
        first = config.rank * config.num_experts_per_rank
        self.sources: list[tuple[int, int]] = []
        self.num_tokens = x.shape[0]
        everybody = self.group.exchange((x, weights, scales, ids))
        for rank, (_, _, _, sent_ids) in enumerate(everybody):
            mine = ((sent_ids >= first) & (sent_ids < first + config.num_experts_per_rank)).any(-1)
            self.sources += [(rank, int(token)) for token in mine.nonzero().flatten()]

        def receive() -> None:
            for row, (rank, token) in enumerate(self.sources):
                for target, sent in zip(out[:4], everybody[rank], strict=True):
                    if sent is not None:
                        target[row] = sent[token]
            out[4].fill_(len(self.sources))

        self.pending.append(receive)
        return tuple(out)

    def combine(
        self, input: torch.Tensor, weights: torch.Tensor | None, indices: torch.Tensor, block_num: int = -1,
        rdma_block_num: int = -1, warp_per_block: int = -1, use_external_inp_buf: int = -1,
        call_reset: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        self._need_split(False)
        result = self._combine(input, indices)
        self.pending.pop()()
        return result

    def combine_send(self, input: torch.Tensor, weights: torch.Tensor | None, indices: torch.Tensor) -> tuple[Any, ...]:
        self._need_split(True)
        return self._combine(input, indices)

    def _combine(self, x: torch.Tensor, ids: torch.Tensor) -> Any:
        need(x.dtype == torch.bfloat16 or (self.wide and x.dtype == torch.float32), "combine takes bf16")
        need(x.shape[0] >= len(self.sources), "received rows are missing")
        need(ids.shape == (self.num_tokens, self.config.num_experts_per_token), "ids are the sender's own")
        dtype = torch.float32 if self.wide else x.dtype
        out = _spoil(torch.empty(self.config.max_num_inp_token_per_rank, x.shape[1], dtype=dtype))
        everybody = self.group.exchange((x, self.sources))

        def receive() -> None:
            total = torch.zeros(self.num_tokens, x.shape[1])
            for sent, sources in everybody:
                for row, (rank, token) in enumerate(sources):
                    if rank == self.group.rank():
                        total[token] += sent[row].float()
            out[: self.num_tokens] = total.to(out.dtype)

        self.pending.append(receive)
        return out, None


def install_mori(monkeypatch: pytest.MonkeyPatch, arch: str = "gfx950", *, wide: bool = False) -> list[str]:
    """`import mori` finds the emulator on a GPU of `arch` until the test ends; returns the group names that shmem was
    started with.
    """
    pretend_rocm(monkeypatch, arch)
    started: list[str] = []
    ops = SimpleNamespace(
        EpDispatchCombineConfig=EpDispatchCombineConfig,
        EpDispatchCombineKernelType=EpDispatchCombineKernelType,
        EpDispatchCombineOp=type("EpDispatchCombineOp", (EpDispatchCombineOp,), {"wide": wide, "arch": arch}),
    )
    shmem = SimpleNamespace(shmem_torch_process_group_init=started.append)
    monkeypatch.setitem(sys.modules, "mori", SimpleNamespace(ops=ops, shmem=shmem))
    return started
