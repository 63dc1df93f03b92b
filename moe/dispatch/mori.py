"""mori: AMD's expert-parallel transport. It sends a token once per rank, with global ids, and only adds in the combine.

Shape letters: T this rank's tokens, R rows of the receive buffer, K top-k, H hidden.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe.config import DispatchDtype, DispatchFormat, MoeA2ABackend
from moe.dispatch.base import InFlight, load_library, without_minus_one
from moe.dispatch.deepep_settings import RANKS_PER_NODE, EpShape
from moe.errors import MoeConfigError, TransportStateError, UnsupportedPathError
from moe.formats.fp8 import FNUZ, FNUZ_FACTOR, to_fnuz
from moe.formats.token_groups import GROUP, quantize_token_groups
from moe.routing import TopKOutput
from moe.types import MoriDispatchOutput, RowsCombineInput

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SPLIT_KERNELS = "AsyncLL"  # one node, low latency: sending and receiving are two calls


@dataclass(frozen=True, kw_only=True, slots=True)
class MoriSettings:
    """Settings of mori. `max_dispatch_tokens`: the most tokens that one rank sends in a step. `max_input_tokens`: rows
    of the receive buffer that the experts get; None for all of them (ranks * max_dispatch_tokens).
    """

    low_latency: bool = False
    max_dispatch_tokens: int = 4096
    max_input_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in ("max_dispatch_tokens", "max_input_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise MoeConfigError(f"{field} is {value}: it must be at least 1")


class MoriBuffer:
    """The transport of one rank, shared by its layers. One batch is in flight at a time."""

    def __init__(
        self,
        group: "ProcessGroup",
        settings: MoriSettings,
        shape: EpShape,
        dispatch_dtype: DispatchDtype,
        *,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    ) -> None:
        """`group` is the process group of the expert-parallel ranks. `fp8_dtype` is this GPU's FP8 variant, the only
        one that mori's kernels are compiled for (see `device_e4m3`).

        Raises:
            UnsupportedPathError: the library is missing, or the dispatch dtype is neither bf16 nor fp8.
        """
        if dispatch_dtype not in (DispatchDtype.BF16, DispatchDtype.FP8):
            raise UnsupportedPathError(f"--moe-a2a-backend mori sends bf16 or fp8, not {dispatch_dtype}")
        if dispatch_dtype is DispatchDtype.FP8 and shape.hidden_size % GROUP:
            raise UnsupportedPathError(f"hidden size {shape.hidden_size}: an fp8 dispatch needs a multiple of {GROUP}")
        if group.size() != shape.ep_size:
            raise MoeConfigError(f"--expert-parallel-size is {shape.ep_size}, but the group has {group.size()} ranks")
        self.settings, self.shape, self.dispatch_dtype, self.fp8_dtype = settings, shape, dispatch_dtype, fp8_dtype
        self.rank: int = group.rank()
        self.kernel = _kernel_name(settings.low_latency, shape.ep_size)
        self.in_flight: InFlight[int] = InFlight("mori", 1)
        library = load_library("mori", MoeA2ABackend.MORI)
        library.shmem.shmem_torch_process_group_init(group.group_name)
        is_fp8 = dispatch_dtype is DispatchDtype.FP8
        self.op: object = library.ops.EpDispatchCombineOp(
            library.ops.EpDispatchCombineConfig(
                data_type=fp8_dtype if is_fp8 else torch.bfloat16,
                rank=self.rank,
                world_size=shape.ep_size,
                hidden_dim=shape.hidden_size,
                scale_dim=shape.hidden_size // GROUP if is_fp8 else 0,
                scale_type_size=torch.float32.itemsize,
                max_token_type_size=torch.bfloat16.itemsize,
                max_num_inp_token_per_rank=settings.max_dispatch_tokens,
                num_experts_per_rank=shape.num_local_experts,
                num_experts_per_token=shape.top_k,
                kernel_type=getattr(library.ops.EpDispatchCombineKernelType, self.kernel),
                gpu_per_node=min(shape.ep_size, RANKS_PER_NODE),
            )
        )


def _kernel_name(low_latency: bool, ep_size: int) -> str:
    if ep_size <= RANKS_PER_NODE:
        return SPLIT_KERNELS if low_latency else "IntraNode"
    return "InterNodeV1LL" if low_latency else "InterNodeV1"


class MoriDispatcher:
    """Dispatch and combine of one layer over a shared `MoriBuffer`."""

    def __init__(self, buffer: MoriBuffer) -> None:
        self.buffer = buffer

    def dispatch(self, hidden_states_TH: torch.Tensor, topk_output: TopKOutput) -> MoriDispatchOutput:
        """Send every token once to each rank that has one of its experts."""
        buffer, x_TH = self.buffer, hidden_states_TH
        num_tokens = x_TH.shape[0]
        self._check_count(num_tokens)
        buffer.in_flight.check_room()
        own_first = buffer.rank * buffer.shape.num_local_experts
        ids_TK, weights_TK = without_minus_one(topk_output, own_first)
        scale_TG = None
        if buffer.dispatch_dtype is DispatchDtype.FP8:
            x_TH, scale_TG = quantize_token_groups(x_TH)
            if buffer.fp8_dtype == FNUZ:
                x_TH, scale_TG = to_fnuz(x_TH), scale_TG * FNUZ_FACTOR
        received = self._call("dispatch", x_TH, weights_TK, scale_TG, ids_TK)
        x_RH, weights_RK, scale_RG, ids_RK, num_received = received
        buffer.in_flight.add(ids_TK, num_tokens)
        rows = slice(buffer.settings.max_input_tokens)
        dispatch_format = DispatchFormat.MORI_LL if buffer.settings.low_latency else DispatchFormat.MORI_NORMAL
        return MoriDispatchOutput(
            dispatch_format, x_RH[rows], None if scale_RG is None else scale_RG[rows], ids_RK[rows], weights_RK[rows],
            num_received, ids_TK, weights_TK,
        )  # fmt: skip

    def combine(self, result: RowsCombineInput) -> torch.Tensor:
        """[T, H]: the first T rows of the transport's output buffer."""
        num_tokens = self.buffer.in_flight.take(result.topk_ids)
        out, _ = self._call("combine", result.hidden_states, None, result.topk_ids)
        return out[:num_tokens]

    def abandon(self, dispatched: MoriDispatchOutput, dtype: torch.dtype) -> None:
        """Combine NaN in place of this rank's results."""
        try:
            rows = torch.full_like(dispatched.hidden_states, float("nan"), dtype=dtype)
            self.combine(dispatched.result(rows, is_partial=False))
        finally:
            self.buffer.in_flight.discard(dispatched.origin_topk_ids)

    def why_not_capturable(self, max_num_tokens: int) -> str:
        """Not capturable: mori's calls have not been tested in a CUDA graph."""
        return "--moe-a2a-backend mori has not been tried in CUDA graphs"

    def prepare_replay(self) -> None:
        """Does nothing, since mori's steps are never captured."""

    def _call(self, name: str, *arguments: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        op = self.buffer.op
        if self.buffer.kernel != SPLIT_KERNELS:
            whole: tuple[torch.Tensor, ...] = getattr(op, name)(*arguments)
            return whole
        result: tuple[torch.Tensor, ...] = getattr(op, f"{name}_send")(*arguments)
        getattr(op, f"{name}_recv")()
        return result

    def _check_count(self, num_tokens: int) -> None:
        settings, ep_size = self.buffer.settings, self.buffer.shape.ep_size
        if num_tokens > settings.max_dispatch_tokens:
            raise TransportStateError(
                f"a step has {num_tokens} tokens, but mori's max_dispatch_tokens is {settings.max_dispatch_tokens}"
            )
        if settings.max_input_tokens is not None and num_tokens * ep_size > settings.max_input_tokens:
            raise TransportStateError(
                f"a step has {num_tokens} tokens on each of {ep_size} ranks, but only {settings.max_input_tokens} "
                "received rows are kept (max_input_tokens): the rest would be lost"
            )
