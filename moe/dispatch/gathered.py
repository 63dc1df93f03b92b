"""Transport `none` for ranks with tokens of their own: all tokens to every rank, then each rank's rows of the sum.

Every rank pads its tokens to the same number, so that the collectives need no counts. With tensor parallelism in
attention, the ranks of a `tp` group have the same tokens; the exchange runs between those with the same place in it.
Shape letters: T tokens of this rank, P of the rank with the most, D ranks of the exchange, H hidden, K top-k.
"""

import torch

from moe.errors import MoeConfigError
from moe.group import Group
from moe.routing import BypassedTopK, StandardTopK, TopKOutput
from moe.types import StandardCombineInput, StandardDispatchOutput


class GatheredDispatcher:
    """All-gather before the experts, reduce-scatter after them, and a sum over `tp` of what is left."""

    def __init__(self, dp: Group, tp: Group) -> None:
        self._dp, self._tp = dp, tp
        self._num_tokens = 0  # of the batch that is between dispatch and combine

    def dispatch(
        self, hidden_states_TH: torch.Tensor, topk_output: TopKOutput, *, max_rank_tokens: int | None = None
    ) -> StandardDispatchOutput:
        """[D * P, H] and their routing. `max_rank_tokens` is P; None if all ranks have T tokens."""
        num_tokens = hidden_states_TH.shape[0]
        num_padded = num_tokens if max_rank_tokens is None else max_rank_tokens
        if num_tokens > num_padded:
            raise MoeConfigError(f"this rank has {num_tokens} tokens, but the ranks agreed on {num_padded} at most")
        self._num_tokens = num_tokens
        x_TH = self._dp.all_gather(_pad(hidden_states_TH, num_padded))
        if isinstance(topk_output, BypassedTopK):
            logits = self._dp.all_gather(_pad(topk_output.logits, num_padded))
            return StandardDispatchOutput(
                x_TH, BypassedTopK(logits, topk_output.config, topk_output.correction_bias)
            )  # fmt: skip
        routed = torch.cat((topk_output.ids.int(), topk_output.weights.float().view(torch.int32)), dim=1)
        ids, weights = self._dp.all_gather(_pad(routed, num_padded, value=-1)).chunk(2, dim=1)
        weights = torch.where(ids < 0, 0.0, weights.contiguous().view(torch.float32))
        return StandardDispatchOutput(x_TH, StandardTopK(weights, ids.contiguous()))

    def add_own(self, result: StandardCombineInput, extra_TH: torch.Tensor) -> None:
        """Add to the rows of this rank's own tokens; ranks of one `tp` group add parts of one sum."""
        first = self._dp.rank * (result.hidden_states.shape[0] // self._dp.size)
        result.hidden_states[first : first + self._num_tokens].add_(extra_TH)

    def combine(self, result: StandardCombineInput) -> torch.Tensor:
        """[T, H] of this rank's tokens, complete."""
        own_PH = self._dp.reduce_scatter(result.hidden_states)
        return self._tp.all_reduce(own_PH[: self._num_tokens])

    def abandon(self, dispatched: StandardDispatchOutput, dtype: torch.dtype) -> None:
        """Every rank gets NaN from this one."""
        self.combine(StandardCombineInput(torch.full_like(dispatched.hidden_states, float("nan"), dtype=dtype)))

    def why_not_capturable(self, max_num_tokens: int) -> str | None:
        """gloo, which moves a GPU's tensors through the host. With NCCL, all ranks replay a step of one size."""
        del max_num_tokens
        return None if self._dp.is_capturable and self._tp.is_capturable else "collectives over gloo"

    def prepare_replay(self) -> None:
        """Does nothing: a replay can start from any state."""


def _pad(x: torch.Tensor, num_rows: int, *, value: int = 0) -> torch.Tensor:
    """Rows of `value` at the end, up to `num_rows`."""
    missing = num_rows - x.shape[0]
    return torch.nn.functional.pad(x, (0, 0, 0, missing), value=value) if missing else x
