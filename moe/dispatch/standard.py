"""The transport of one rank, and of ranks that all see every token: nothing moves, partial sums are reduced."""

from collections.abc import Callable

import torch

from moe.errors import MoeConfigError
from moe.types import StandardCombineInput, StandardDispatchOutput, TopKOutput

Reduce = Callable[[torch.Tensor], torch.Tensor]


class StandardDispatcher:
    """Hands tokens over as they are. `combine` is the one place that sums the ranks' parts."""

    def __init__(self, reduce: Reduce | None = None) -> None:
        """`reduce` sums [T, H] over all ranks of the layer and returns the sum; None where there is one rank."""
        self._reduce = reduce

    def dispatch(self, hidden_states_TH: torch.Tensor, topk_output: TopKOutput) -> StandardDispatchOutput:
        """Tokens and their routing, untouched."""
        return StandardDispatchOutput(hidden_states_TH, topk_output)

    def combine(self, result: StandardCombineInput) -> torch.Tensor:
        """[T, H]; reduced if `result` is partial, returned as it is if it is complete.

        Raises:
            MoeConfigError: the result is partial, but this dispatcher was built without `reduce`.
        """
        if not result.is_partial:
            return result.hidden_states
        if self._reduce is None:
            raise MoeConfigError("the experts returned one rank's part of a sum, but the dispatcher has no reduce")
        return self._reduce(result.hidden_states)

    def abandon(self, dispatched: StandardDispatchOutput, dtype: torch.dtype) -> None:
        """Ranks that sum get NaN for this one's part; alone, nothing was sent and nothing is left behind."""
        if self._reduce is not None:
            self._reduce(torch.full_like(dispatched.hidden_states, float("nan"), dtype=dtype))

    def why_not_capturable(self, max_num_tokens: int) -> None:
        """Nothing waits for the host; NCCL's sum of partial results can be captured too."""

    def prepare_replay(self) -> None:
        """A replay starts from any state."""
