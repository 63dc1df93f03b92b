"""Log-probabilities of chosen tokens and of the best alternatives, from the model's own logits (before any processor).

Shape letters: R rows, V vocabulary, K alternatives.
"""

from dataclasses import dataclass

import torch

from engine.transfer import to_device, to_host
from engine.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Entries of R tokens on their way to the host."""

    ids_R: torch.Tensor
    values_R: torch.Tensor
    top_ids_RK: torch.Tensor | None
    top_values_RK: torch.Tensor | None

    def read(self) -> list[TokenLogprobs]:
        """One entry a row; call after the device has passed a mark made later."""
        ids, values = self.ids_R.tolist(), self.values_R.tolist()
        if self.top_ids_RK is None or self.top_values_RK is None:
            return [TokenLogprobs(token, value, []) for token, value in zip(ids, values, strict=True)]
        tops = zip(self.top_ids_RK.tolist(), self.top_values_RK.tolist(), strict=True)
        return [
            TokenLogprobs(token, value, list(zip(top_ids, top_values, strict=True)))
            for token, value, (top_ids, top_values) in zip(ids, values, tops, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class PendingListed:
    """Log-probabilities of the tokens that some rows list, on their way to the host: rows without a list have none."""

    ids: list[tuple[int, ...]]  # of every row
    values_WI: torch.Tensor  # of the W rows with a list; beyond the end of a list: unused

    def read(self) -> list[list[tuple[int, float]]]:
        """Tokens and values of every row; call after the device has passed a mark made later."""
        values = iter(self.values_WI.tolist())
        return [list(zip(ids, next(values), strict=False)) if ids else [] for ids in self.ids]


def launch_listed(logits_LV: torch.Tensor, logit_rows: list[int], ids: list[tuple[int, ...]]) -> PendingListed | None:
    """Of each row of the model's own logits: the log-probabilities of its tokens `ids`. None if all lists are empty.

    `logit_rows` says where the logits of each row are.
    """
    wanted = [row for row, listed in enumerate(ids) if listed]
    if not wanted:
        return None
    width = max(map(len, ids))
    padded = [[*ids[row], *[0] * (width - len(ids[row]))] for row in wanted]
    rows_W = to_device([logit_rows[row] for row in wanted], torch.int64, logits_LV.device)
    ids_WI = to_device(padded, torch.int64, logits_LV.device)
    values_WI = torch.log_softmax(logits_LV.index_select(0, rows_W), dim=-1).gather(1, ids_WI)
    return PendingListed(ids, to_host(values_WI))


def launch_logprobs(logprobs_RV: torch.Tensor, ids_R: torch.Tensor, num_top: int) -> PendingLogprobs:
    """Of each row of log-softmax values: that of its token `ids_R` and the `num_top` best, best first."""
    chosen_R = logprobs_RV.gather(1, ids_R[:, None])[:, 0]
    if num_top == 0:
        return PendingLogprobs(to_host(ids_R), to_host(chosen_R), None, None)
    best = logprobs_RV.topk(min(num_top, logprobs_RV.shape[1]), dim=1)
    return PendingLogprobs(to_host(ids_R), to_host(chosen_R), to_host(best.indices), to_host(best.values))
