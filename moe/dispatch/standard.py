"""Transport `none`, for one rank or ranks that all have every token: sends nothing, and reduces partial sums."""

from collections.abc import Callable

import torch

from moe.errors import MoeConfigError
from moe.group import Group, PartialSum, SumPlace
from moe.routing import TopKOutput
from moe.types import StandardCombineInput, StandardDispatchOutput

Reduce = Callable[[torch.Tensor], torch.Tensor]


class StandardDispatcher:
    """Hands tokens over unchanged. `combine` and `combine_later` alone sum over ranks."""

    def __init__(self, reduce: Reduce | None = None, *, is_capturable: bool = True, group: Group | None = None) -> None:
        """`reduce` sums [T, H] over all ranks of the layer and returns the sum; None for a single rank.

        `is_capturable`: CUDA graphs can hold `reduce`. `group`: the ranks over which `reduce` sums, if they run whole
        layers together; then the sum can be left to the next layer.
        """
        self._reduce = reduce
        self._is_capturable = is_capturable
        self._group = group

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

    def combine_later(self, result: StandardCombineInput) -> torch.Tensor | PartialSum:
        """As `combine`, but a sum over ranks that can be left to the next layer is not added up."""
        if not result.is_partial or self._group is None:
            return self.combine(result)
        return PartialSum(result.hidden_states, self._group, SumPlace.MLP)

    def add_own(self, result: StandardCombineInput, extra_TH: torch.Tensor) -> None:
        """Add one rank's part of another sum to its part of this one, so that both cross the ranks together."""
        result.hidden_states.add_(extra_TH)

    def abandon(self, dispatched: StandardDispatchOutput, dtype: torch.dtype) -> None:
        """Sum NaN in place of this rank's part, as the others do. Without `reduce` there is nothing to give up.

        After the last layer the others may add up fewer rows. They then wait until this rank's process ends.
        """
        part_TH = torch.full_like(dispatched.hidden_states, float("nan"), dtype=dtype)
        if self._group is not None:
            PartialSum(part_TH, self._group, SumPlace.MLP).give_up()
        elif self._reduce is not None:
            self._reduce(part_TH)

    def why_not_capturable(self, max_num_tokens: int) -> str | None:
        """Only gloo's all-reduce waits for the host; NCCL's can be captured."""
        del max_num_tokens
        return None if self._is_capturable else "collectives over gloo"

    def prepare_replay(self) -> None:
        """Does nothing: a replay can start from any state."""
