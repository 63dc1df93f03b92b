"""FlashInfer's MNNVL all-to-all: every rank gets slots for all ranks' tokens; unused slots carry expert id -1.

Shape letters: T this rank's tokens, P ranks, M token limit per rank, R = P * M slots, K top-k, H hidden.
"""

import socket
from typing import Any

import torch

from moe.config import MoeA2ABackend
from moe.dispatch.base import load_library, without_minus_one
from moe.dispatch.deepep_settings import EpShape
from moe.dispatch.dtype import Quantize
from moe.errors import MoeConfigError, TransportStateError
from moe.types import FlashinferCombineInput, FlashinferDispatchOutput, StandardTopK, TopKOutput

NO_EXPERT = -1


class FlashinferDispatcher:
    """Dispatch and combine of one layer. The experts multiply by the router weights; ranks are added unweighted."""

    def __init__(
        self, alltoall: Any, rank: int, shape: EpShape, max_tokens: int, quantize: Quantize | None = None
    ) -> None:
        """`alltoall` comes from `build_alltoall` and may serve all layers.

        `quantize` turns [T, H] into (packed NVFP4 [T, H/2], scales [T, H/16]) before sending; None sends bf16.
        """
        if max_tokens < 1:
            raise MoeConfigError(f"max_tokens is {max_tokens}: it must be at least 1")
        self._alltoall = alltoall
        self._shape = shape
        self._max_tokens = max_tokens
        self._own_expert = rank * shape.num_local_experts
        self._quantize = quantize

    def dispatch(self, hidden_states_TH: torch.Tensor, topk_output: TopKOutput) -> FlashinferDispatchOutput:
        """Send tokens, scales, ids and weights; received ids of other ranks' experts become -1."""
        num_tokens = hidden_states_TH.shape[0]
        if num_tokens > self._max_tokens:
            raise TransportStateError(f"a step has {num_tokens} tokens, but the transport holds {self._max_tokens}")
        ids_TK, weights_TK = without_minus_one(topk_output, self._own_expert)
        sent = [hidden_states_TH] if self._quantize is None else list(self._quantize(hidden_states_TH))
        received = self._alltoall.dispatch(
            ids_TK,
            [*sent, ids_TK, weights_TK],
            self._max_tokens,
            invalid_token_expert_id=NO_EXPERT,
            expert_id_payload_index=len(sent),
        )
        *x_and_scale, ids_RK, weights_RK = (tensor.flatten(0, 1) for tensor in received)
        scale = x_and_scale[1] if len(x_and_scale) > 1 else None
        return FlashinferDispatchOutput(x_and_scale[0], StandardTopK(weights_RK, ids_RK), scale)

    def combine(self, result: FlashinferCombineInput) -> torch.Tensor:
        """[T, H] of this rank's tokens, complete."""
        payload = result.hidden_states.unflatten(0, (self._shape.ep_size, self._max_tokens))
        out_TH: torch.Tensor = self._alltoall.combine(payload, self._max_tokens)
        return out_TH

    def abandon(self, dispatched: FlashinferDispatchOutput, dtype: torch.dtype) -> None:
        """Combine NaN in place of this rank's results; the library refuses a dispatch before a combine."""
        result = dispatched.empty_result(dtype)
        result.hidden_states.fill_(float("nan"))
        self.combine(result)

    def why_not_capturable(self, max_num_tokens: int) -> str:
        """Nobody has captured its calls yet."""
        return "--moe-a2a-backend flashinfer has not been tried in CUDA graphs"

    def prepare_replay(self) -> None:
        """Nothing is captured."""


def build_alltoall(group: Any, shape: EpShape, max_tokens: int) -> Any:
    """The library's transport for this rank of `group`, the ranks that share the experts. All ranks call it together.

    Raises:
        UnsupportedPathError: FlashInfer is not installed.
        MoeConfigError: the group's size differs from the number of expert-parallel ranks.
    """
    comm = load_library("flashinfer.comm", MoeA2ABackend.FLASHINFER)
    mnnvl = load_library("flashinfer.comm.mnnvl", MoeA2ABackend.FLASHINFER)
    if group.size() != shape.ep_size:
        raise MoeConfigError(f"--expert-parallel-size is {shape.ep_size}, but the group has {group.size()} ranks")
    ranks = group_communicator(mnnvl, group)
    host = socket.gethostname()
    mapping = comm.Mapping(
        world_size=shape.ep_size,
        rank=group.rank(),
        gpus_per_node=ranks.allgather(host).count(host),
        tp_size=shape.ep_size,
        moe_ep_size=shape.ep_size,
        moe_tp_size=1,
    )
    return comm.MoeAlltoAll(
        mapping,
        max_tokens,
        shape.top_k,
        shape.num_experts,
        hidden_size=shape.hidden_size,
        mnnvl_config=mnnvl.MnnvlConfig(comm_backend=ranks),
    )


def group_communicator(mnnvl: Any, group: Any) -> Any:
    """Exchanges memory handles over `group` of torch.distributed, instead of MPI, the library's default."""

    class GroupCommunicator(mnnvl.TorchDistBackend):
        """The library's own communicator, which is not split: all its ranks share the experts."""

        def Split(self, color: int, key: int) -> "GroupCommunicator":
            """Itself. The library's Split confuses the group's ranks with the world's, and hangs if they differ."""
            del color, key
            return self

    return GroupCommunicator(group)
