"""Transport `none`, for one rank or ranks that all have every token: sends nothing, and reduces partial sums."""

from collections.abc import Callable

import torch

from moe.errors import MoeConfigError
from moe.routing import TopKOutput
from moe.types import StandardCombineInput, StandardDispatchOutput

Reduce = Callable[[torch.Tensor], torch.Tensor]


class StandardDispatcher:
    """Hands tokens over unchanged. `combine` is the only place that sums over ranks."""

    def __init__(self, reduce: Reduce | None = None, *, is_capturable: bool = True) -> None:
        """`reduce` sums [T, H] over all ranks of the layer and returns the sum; None for a single rank.

        `is_capturable`: CUDA graphs can hold `reduce`.
        """
        self._reduce = reduce
        self._is_capturable = is_capturable

    def dispatch(self, hidden_states_TH: torch.Tensor, topk_output: TopKOutput) -> StandardDispatchOutput:
        """Tokens and their routing, untouched."""
        return StandardDispatchOutput(hidden_states_TH, topk_output)

    def combine(self, result: StandardCombineInput) -> torch.Tensor:
        """[T, H]: reduced over the ranks if `result` is partial, unchanged if it is complete.

        Raises:
            MoeConfigError: the result is partial, but this dispatcher was built without `reduce`.
        """
        if not result.is_partial:
            return result.hidden_states
        if self._reduce is None:
            raise MoeConfigError("the experts returned one rank's part of a sum, but the dispatcher has no reduce")
        return self._reduce(result.hidden_states)

    def add_own(self, result: StandardCombineInput, extra_TH: torch.Tensor) -> None:
        """Add one rank's part of another sum to its part of this one, so that both cross the ranks together."""
        result.hidden_states.add_(extra_TH)

    def abandon(self, dispatched: StandardDispatchOutput, dtype: torch.dtype) -> None:
        """Reduce NaN in place of this rank's part. Without `reduce` there is nothing to give up."""
        if self._reduce is not None:
            self._reduce(torch.full_like(dispatched.hidden_states, float("nan"), dtype=dtype))

    def why_not_capturable(self, max_num_tokens: int) -> str | None:
        """Only gloo's all-reduce waits for the host; NCCL's can be captured."""
        del max_num_tokens
        return None if self._is_capturable else "collectives over gloo"

    def prepare_replay(self) -> None:
        """Does nothing: a replay can start from any state."""
