"""FlashInfer's `MoeAlltoAll` for ranks that are threads: slots per source rank, garbage where no token was sent."""

from typing import Any

import pytest
import torch

from tests.emulators.device import import_flashinfer
from tests.emulators.ranks import this_rank
from tests.emulators.refusal import need


class MoeAlltoAll:
    def __init__(
        self,
        mapping: Any,
        max_num_tokens: int,
        top_k: int,
        num_experts: int,
        workspace_size_per_rank: int | None = None,
        hidden_size: int | None = None,
        mnnvl_config: Any = None,
        eplb_stats_num_experts: int = 0,
        enable_rank_mask: bool = False,
        *,
        backend: str = "trtllm",
    ) -> None:
        self.rank = this_rank()
        need(mapping.moe_ep_rank == self.rank.rank() and mapping.moe_ep_size == self.rank.size(), "mapping")
        need(hidden_size is not None, "hidden_size or the size of the workspace")
        self.limit, self.top_k, self.num_local = max_num_tokens, top_k, num_experts // self.rank.size()
        self.phase = "idle"

    def dispatch(
        self,
        token_selected_experts: torch.Tensor,
        input_payloads: list[torch.Tensor],
        runtime_max_tokens_per_rank: int,
        invalid_token_expert_id: int | None = None,
        expert_id_payload_index: int | None = None,
        eplb_local_stats: Any = None,
        active_rank_mask: Any = None,
    ) -> list[torch.Tensor]:
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
        self.sent_to = []
        for rank, (sent_ids, payloads) in enumerate(everybody):
            here = (sent_ids // self.num_local == self.rank.rank()).any(-1)
            self.received[rank, : here.shape[0]] = here
            for target, payload in zip(out, payloads, strict=True):
                target[rank, : here.shape[0]][here] = payload[here]
        if invalid_token_expert_id is not None:
            assert expert_id_payload_index is not None
            out[expert_id_payload_index][~self.received] = invalid_token_expert_id
        self.phase, self.num_tokens = "dispatched", ids.shape[0]
        return out

    def combine(
        self,
        payload: torch.Tensor,
        runtime_max_tokens_per_rank: int,
        payload_in_workspace: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        need(self.phase == "dispatched", "combine called before successful dispatch")
        need(payload.shape[:2] == self.received.shape and payload.is_contiguous(), "payload [ranks, limit, H]")
        total = torch.zeros(self.num_tokens, payload.shape[2])
        for sent, received in self.rank.exchange((payload, self.received)):
            mine = received[self.rank.rank(), : self.num_tokens]
            total[mine] += sent[self.rank.rank(), : self.num_tokens][mine].float()
        self.phase = "idle"
        return total


def install_alltoall(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flashinfer.comm.MoeAlltoAll` is the emulator until the test ends; its `Mapping` is the library's own."""
    import_flashinfer()
    import flashinfer.comm

    monkeypatch.setattr(flashinfer.comm, "MoeAlltoAll", MoeAlltoAll)
