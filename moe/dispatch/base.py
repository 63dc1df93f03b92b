"""The dispatcher interface of all transports, and the bookkeeping of batches between dispatch and combine."""

import importlib
import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

import torch

from moe.config import DispatchFormat, MoeA2ABackend
from moe.errors import TransportStateError, UnsupportedPathError
from moe.overlap import DownGemmOverlap
from moe.packages import not_installed
from moe.routing import TopKOutput
from moe.types import DispatchOutput

Out = TypeVar("Out")
Out_co = TypeVar("Out_co", covariant=True)
In_contra = TypeVar("In_contra", contravariant=True)
Handle = TypeVar("Handle")

logger = logging.getLogger(__name__)


class Exchange(Protocol[Out_co, In_contra]):
    """Moves tokens to the ranks that own their experts and brings the weighted sum back. All ranks make both calls."""

    def dispatch(self, hidden_states_TH: torch.Tensor, topk_output: TopKOutput) -> Out_co:
        """Tokens for the local experts, in the transport's layout."""

    def combine(self, result: In_contra) -> torch.Tensor:
        """[T, H] of this rank's own tokens, complete."""


class Dispatcher(Exchange[Out, In_contra], Protocol[Out, In_contra]):
    """The exchange of one layer over a real transport. It can fail between its two calls, and CUDA graphs can hold it.

    After `dispatch`, every rank calls `combine`, or `abandon` if its experts failed.
    """

    def abandon(self, dispatched: Out, dtype: torch.dtype) -> None:
        """Give up a dispatched batch whose experts failed, and leave the transport ready for the next one.

        The other ranks are waiting for this rank's results (of `dtype`). They get NaN, so that no rank mistakes an
        incomplete sum for an answer.
        """

    def why_not_capturable(self, max_num_tokens: int) -> str | None:
        """Why CUDA graphs cannot capture decode steps of up to `max_num_tokens` tokens a rank; None if they can."""

    def prepare_replay(self) -> None:
        """Bring the transport into the state in which a captured decode step starts.

        All ranks call it together, outside of captures, before each capture and each replay.
        """


class OverlappingDispatcher(Dispatcher[Out, In_contra], Protocol[Out, In_contra]):
    """A dispatcher whose combine may run beside the experts' second GEMM."""

    def begin_overlap(self, dispatched: Out) -> DownGemmOverlap | None:
        """Arguments of the runner for these tokens; None where their combine has to wait for the experts."""

    def combine(self, result: In_contra, overlap: DownGemmOverlap | None = None) -> torch.Tensor:
        """[T, H]; `overlap`: what the experts ran with."""


AnyExchange = Exchange[Any, Any]  # records of one transport go back to it, so callers need not know their types
AnyDispatcher = Dispatcher[Any, Any]


def abandon(dispatcher: AnyDispatcher, dispatched: DispatchOutput, dtype: torch.dtype) -> None:
    """`dispatcher.abandon`, for a caller that is about to raise: its own errors are only logged."""
    try:
        dispatcher.abandon(dispatched, dtype)
    except Exception:  # whatever broke the experts may break the transport too
        logger.warning("the other ranks could not be told that this rank's experts failed", exc_info=True)


def mode_options(dispatch_formats: tuple[DispatchFormat, ...], *, is_decode: bool) -> dict[str, bool]:
    """Keywords of `dispatch` that choose between a transport's two layouts; empty for transports with one layout."""
    return {"is_decode": is_decode} if len(dispatch_formats) > 1 else {}


class InFlight(Generic[Handle]):
    """Handles of at most `limit` dispatched batches. Combine hands back a batch's ids tensor, which is the key."""

    def __init__(self, transport: str, limit: int) -> None:
        self._transport = transport
        self._limit = limit
        self._entries: list[tuple[torch.Tensor, Handle]] = []

    def check_room(self) -> None:
        """Raise TransportStateError if the next dispatch would overwrite a result still in use."""
        if len(self._entries) >= self._limit:
            raise TransportStateError(
                f"{self._transport}: {self._limit} dispatched batches wait for their combine and the buffer holds no "
                "more: combine one before the next dispatch"
            )

    def add(self, topk_ids: torch.Tensor, handle: Handle) -> None:
        """Remember a dispatched batch."""
        self._entries.append((topk_ids, handle))

    def __len__(self) -> int:
        """Batches that wait for their combine."""
        return len(self._entries)

    def take(self, topk_ids: torch.Tensor) -> Handle:
        """The handle of the batch with exactly this ids tensor."""
        handle = self.discard(topk_ids)
        if handle is None:
            raise TransportStateError(
                f"{self._transport}: combine got ids of no dispatched batch; a path must hand back the ids it was given"
            )
        return handle

    def discard(self, topk_ids: torch.Tensor) -> Handle | None:
        """Forget the batch with exactly this ids tensor; its handle, or None if there is no such batch."""
        for position, (ids, handle) in enumerate(self._entries):
            if ids is topk_ids:
                del self._entries[position]
                return handle
        return None


def ids_and_weights(topk_output: TopKOutput, ids_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Routed ids in the transport's dtype and fp32 weights, both contiguous."""
    topk = topk_output.to_standard()
    return topk.ids.to(ids_dtype).contiguous(), topk.weights.float().contiguous()


def without_minus_one(topk_output: TopKOutput, own_expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 ids and fp32 weights for kernels that cannot handle an id of -1.

    -1 becomes `own_expert`, an expert of this rank, with weight 0: the slot is not sent and adds nothing.
    """
    ids_TK, weights_TK = ids_and_weights(topk_output, torch.int32)
    is_used = ids_TK >= 0
    return torch.where(is_used, ids_TK, own_expert), torch.where(is_used, weights_TK, 0.0)


def pad_columns(x: torch.Tensor, num_cols: int) -> torch.Tensor:
    """Pad with zero columns at the end up to `num_cols`; returns the same tensor if it is wide enough."""
    missing = num_cols - x.shape[-1]
    return x if missing == 0 else torch.nn.functional.pad(x, (0, missing))


def accepted(function: Callable[..., object], **arguments: object) -> dict[str, object]:
    """The subset of `arguments` that `function` accepts in the installed release."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}


def load_library(name: str, transport: MoeA2ABackend) -> ModuleType:
    """Import a transport's package when the transport is built.

    Raises:
        UnsupportedPathError: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedPathError(
            f"--moe-a2a-backend {transport} needs {not_installed(name.partition('.')[0])}"
        ) from error
