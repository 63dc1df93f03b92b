"""FlashInfer's `MoeAlltoAll` for ranks that are threads: slots per source rank, garbage where no token was sent.

The library: flashinfer-python 0.7.2.post1 (commit beabf50), comm/trtllm_moe_alltoall.py and comm/mnnvl.py. Without a
communicator in `mnnvl_config` it imports mpi4py; the emulator does the same.
"""

from typing import Any

import pytest
import torch

from tests.emulators.device import import_flashinfer
from tests.emulators.ranks import this_rank
from tests.emulators.refusal import KernelRefusal, need


class MoeAlltoAll:
    def __init__(
        self, mapping: Any, max_num_tokens: int, top_k: int, num_experts: int,
        workspace_size_per_rank: int | None = None, hidden_size: int | None = None, mnnvl_config: Any = None,
        eplb_stats_num_experts: int = 0, enable_rank_mask: bool = False, *, backend: str = "trtllm",
    ) -> None:  # fmt: skip
        self.rank = this_rank()
        need(mapping.moe_ep_rank == self.rank.rank() and mapping.moe_ep_size == self.rank.size(), "mapping")
        need(hidden_size is not None, "hidden_size or the size of the workspace")
        self._share_memory(mapping, mnnvl_config)
        self.limit, self.top_k, self.num_local = max_num_tokens, top_k, num_experts // self.rank.size()
        self.phase = "idle"

    def _share_memory(self, mapping: Any, mnnvl_config: Any) -> None:
        """The library's `set_comm_from_config` or, without a config, `get_comm`; then handles go to all ranks."""
        from flashinfer.comm.comm_backend import MpiComm

        source = mnnvl_config.comm_backend if mnnvl_config else MpiComm()
        comm = source.Split(mapping.pp_rank * mapping.cp_size + mapping.cp_rank, mapping.tp_rank)
        ranks = (mapping.moe_ep_rank, mapping.moe_ep_size)
        need((comm.Get_rank(), comm.Get_size()) == ranks, "ranks that share memory")
        need(len(comm.allgather(self.rank.rank())) == mapping.moe_ep_size, "a rank gave no handle")
        need(1 <= mapping.gpus_per_node <= mapping.world_size, "gpus_per_node is no number of ranks of a node")

    def dispatch(
        self, token_selected_experts: torch.Tensor, input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int, invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None, eplb_local_stats: Any = None, active_rank_mask: Any = None,
    ) -> list[torch.Tensor]:  # fmt: skip
        need(self.phase == "idle", "dispatch called twice without combine")
        ids = token_selected_experts
        need(ids.dtype == torch.int32 and bool((ids >= 0).all()), "every id is a destination: -1 is none")
        need(ids.shape[0] <= runtime_max_tokens_per_rank <= self.limit, "too many tokens")
        need(all(payload.is_contiguous() for payload in input_payloads), "contiguous payloads")
        everybody = self.rank.exchange((ids, input_payloads))
        self.received = torch.zeros(self.rank.size(), runtime_max_tokens_per_rank, dtype=torch.bool)
        slots = [(self.rank.size(), runtime_max_tokens_per_rank, *payload.shape[1:]) for payload in input_payloads]
        garbage = {torch.int32: 10**6, torch.uint8: 255}
        out = [
            torch.full(shape, garbage.get(payload.dtype, float("nan")), dtype=payload.dtype)
            for shape, payload in zip(slots, input_payloads, strict=True)
        ]
        for rank, (sent_ids, payloads) in enumerate(everybody):
            here = (sent_ids // self.num_local == self.rank.rank()).any(-1)
            self.received[rank, : here.shape[0]] = here
            for target, payload in zip(out, payloads, strict=True):
                target[rank, : here.shape[0]][here] = payload[here]
        if invalid_token_expert_id is not None:
            out[expert_id_payload_index][~self.received] = invalid_token_expert_id
        self.phase, self.num_tokens = "dispatched", ids.shape[0]
        return out

    def combine(
        self, payload: torch.Tensor, runtime_max_tokens_per_rank: int, payload_in_workspace: bool = False,
        **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        need(self.phase == "dispatched", "combine called before successful dispatch")
        need(payload.shape[:2] == self.received.shape and payload.is_contiguous(), "payload [ranks, limit, H]")
        total = torch.zeros(self.num_tokens, payload.shape[2])
        for sent, received in self.rank.exchange((payload, self.received)):
            mine = received[self.rank.rank(), : self.num_tokens]
            total[mine] += sent[self.rank.rank(), : self.num_tokens][mine].float()
        self.phase = "idle"
        return total


class TorchDistBackend:
    """The library's communicator over torch.distributed, here over ranks that are threads."""

    def __init__(self, group: Any | None = None) -> None:
        need(group is not None, "the default process group may hold other ranks than those of the experts")
        self.group: Any = group

    def Get_rank(self) -> int:
        return self.group.rank()

    def Get_size(self) -> int:
        return self.group.size()

    def allgather(self, data: Any) -> tuple[Any, ...]:
        return tuple(self.group.exchange(data))

    def Split(self, color: int, key: int) -> "TorchDistBackend":
        raise KernelRefusal("the library's Split takes ranks of the group for ranks of the world")


def install_alltoall(monkeypatch: pytest.MonkeyPatch) -> None:
    """`MoeAlltoAll` of `flashinfer.comm` and its communicator are emulated until the test ends; `Mapping` is real."""
    import_flashinfer()
    import flashinfer.comm
    import flashinfer.comm.mnnvl

    monkeypatch.setattr(flashinfer.comm, "MoeAlltoAll", MoeAlltoAll)
    monkeypatch.setattr(flashinfer.comm.mnnvl, "TorchDistBackend", TorchDistBackend)
