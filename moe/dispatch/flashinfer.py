"""FlashInfer's MNNVL all-to-all: every rank has rows for the tokens of all ranks; unused rows have expert id -1.

Shape letters: T this rank's tokens, P ranks, M token limit per rank, R = P * M rows, K top-k, H hidden.
"""

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from moe.config import MoeA2ABackend
from moe.dispatch.base import load_library, without_minus_one
from moe.dispatch.deepep_settings import EpShape
from moe.errors import MoeConfigError, TransportStateError
from moe.routing import StandardTopK, TopKOutput
from moe.types import FlashinferCombineInput, FlashinferDispatchOutput, Quantize

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NO_EXPERT = -1


class AllToAll(Protocol):
    """The library's transport."""

    @property
    def dispatch(self) -> Callable[..., list[torch.Tensor]]:
        """Send tensors [T, ..]; returns the received ones [P, M, ..]."""

    @property
    def combine(self) -> Callable[..., torch.Tensor]:
        """Results [P, M, H] to the sums [T, H]."""


class Communicator(Protocol):
    """The library's link between the ranks of a group."""

    def allgather(self, data: str) -> list[str]:
        """The strings of all ranks."""


class FlashinferDispatcher:
    """Dispatch and combine of one layer. The experts apply the router weights; the combine only adds."""

    def __init__(
        self, alltoall: AllToAll, rank: int, shape: EpShape, max_tokens: int, quantize: Quantize | None = None
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
        return self._alltoall.combine(payload, self._max_tokens)

    def abandon(self, dispatched: FlashinferDispatchOutput, dtype: torch.dtype) -> None:
        """Combine NaN in place of this rank's results; the library refuses a dispatch before a combine."""
        size = (dispatched.hidden_states.shape[0], self._shape.hidden_size)
        rows = torch.full(size, float("nan"), dtype=dtype, device=dispatched.hidden_states.device)
        self.combine(dispatched.result(rows, is_partial=False))

    def why_not_capturable(self, max_num_tokens: int) -> str:
        """Not capturable: its calls have not been tested in a CUDA graph."""
        return "--moe-a2a-backend flashinfer has not been tried in CUDA graphs"

    def prepare_replay(self) -> None:
        """Does nothing, since its steps are never captured."""


def build_alltoall(group: "ProcessGroup", shape: EpShape, max_tokens: int) -> AllToAll:
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
    alltoall: AllToAll = comm.MoeAlltoAll(
        mapping,
        max_tokens,
        shape.top_k,
        shape.num_experts,
        hidden_size=shape.hidden_size,
        mnnvl_config=mnnvl.MnnvlConfig(comm_backend=ranks),
    )
    return alltoall


def group_communicator(mnnvl: Any, group: "ProcessGroup") -> "Communicator":
    """Exchanges memory handles over `group` of torch.distributed, instead of MPI, the library's default."""

    class GroupCommunicator(mnnvl.TorchDistBackend):
        """The library's own communicator, which is not split: all its ranks share the experts."""

        def Split(self, color: int, key: int) -> "GroupCommunicator":
            """Itself. The library's Split confuses the group's ranks with the world's, and hangs if they differ."""
            del color, key
            return self

    communicator: Communicator = GroupCommunicator(group)
    return communicator
