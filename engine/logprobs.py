"""Log-probabilities of chosen tokens and of the best alternatives, from the model's own logits (before any rule).

Shape letters: R rows, V vocabulary.
"""

import torch

from engine.types import TokenLogprobs


def token_logprobs(logprobs_RV: torch.Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """One entry a row of log-softmax values: that of `token_ids[row]` and the `num_top` best, best first."""
    ids_R1 = torch.tensor(token_ids, device=logprobs_RV.device)[:, None]
    chosen = logprobs_RV.gather(1, ids_R1)[:, 0].tolist()
    if num_top == 0:
        return [TokenLogprobs(token, value, []) for token, value in zip(token_ids, chosen, strict=True)]
    best = logprobs_RV.topk(min(num_top, logprobs_RV.shape[1]), dim=1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, value, list(zip(top_ids, top_values, strict=True)))
        for token, value, (top_ids, top_values) in zip(token_ids, chosen, tops, strict=True)
    ]


def prompt_logprobs(logits_RV: torch.Tensor, next_ids: list[int], num_top: int) -> list[TokenLogprobs | None]:
    """Entries for the prompt tokens `next_ids`, each predicted by the row of the token before it."""
    return list(token_logprobs(torch.log_softmax(logits_RV, dim=-1), next_ids, num_top))
