"""Log-probabilities of chosen tokens and of the best alternatives, from the model's own logits (before any processor).

Shape letters: R rows, V vocabulary, K alternatives.
"""

from dataclasses import dataclass

import torch

from engine.transfer import to_device, to_host
from engine.types import TokenLogprobs

_BLOCK_ROWS = 64
_Picked = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
    return _to_host(ids_R, [_pick(logprobs_RV, ids_R, num_top)])


def launch_prompt_logprobs(logits_RV: torch.Tensor, ids_R: torch.Tensor, num_top: int) -> PendingLogprobs:
    """The same from logits, a few rows at a time: log-softmax of all would need their memory, gigabytes, once more."""
    blocks = zip(logits_RV.split(_BLOCK_ROWS), ids_R.split(_BLOCK_ROWS), strict=True)
    return _to_host(ids_R, [_pick(torch.log_softmax(rows_RV, dim=-1), ids, num_top) for rows_RV, ids in blocks])


def _pick(logprobs_RV: torch.Tensor, ids_R: torch.Tensor, num_top: int) -> _Picked:
    """Values [R] of the tokens, values [R, K] and ids [R, K] of the best; K is 0 without alternatives."""
    best = logprobs_RV.topk(min(num_top, logprobs_RV.shape[1]), dim=1)
    return logprobs_RV.gather(1, ids_R[:, None])[:, 0], best.values, best.indices


def _to_host(ids_R: torch.Tensor, picked: list[_Picked]) -> PendingLogprobs:
    """Entries of blocks of rows, which come one after another in `ids_R`."""
    chosen_R, values_RK, top_ids_RK = (torch.cat(parts) for parts in zip(*picked, strict=True))
    if not values_RK.shape[1]:
        return PendingLogprobs(to_host(ids_R), to_host(chosen_R), None, None)
    return PendingLogprobs(to_host(ids_R), to_host(chosen_R), to_host(top_ids_RK), to_host(values_RK))
