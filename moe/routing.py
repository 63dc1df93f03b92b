"""Router logits to expert ids and weights, in fp32. Ids are int32, distinct and valid; ties take the lowest id.

Shape letters: T tokens, E experts, K top-k, G groups.
"""

from dataclasses import dataclass

import torch

from moe.config import RoutingConfig, RoutingMethod
from moe.device import as_dtype

_EPS = 1e-20  # keeps the normalising sum away from zero when every chosen score underflows
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class StandardTopK:
    """Chosen experts: fp32 `weights` [T, K] (scaling factor included) and int32 global `ids` [T, K], -1 = none."""

    weights: torch.Tensor
    ids: torch.Tensor

    def to_standard(self) -> "StandardTopK":
        """Returns self, so that callers need not tell the two forms apart."""
        return self


@dataclass(frozen=True, slots=True)
class BypassedTopK:
    """Input of a kernel that routes inside: `logits` [T, E], the routing rules and the fp32 correction bias [E]."""

    logits: torch.Tensor
    config: RoutingConfig
    correction_bias: torch.Tensor | None = None

    def to_standard(self) -> StandardTopK:
        """Route now, for kernels that need ids and weights."""
        return route(self.logits, self.config, self.correction_bias)


TopKOutput = StandardTopK | BypassedTopK


def route(
    logits_TE: torch.Tensor, config: RoutingConfig, correction_bias_E: torch.Tensor | None = None
) -> StandardTopK:
    """Expert ids and weights of every token.

    A row with a non-finite logit gets valid, distinct ids; only that row is affected.
    """
    logits_TE = as_dtype(logits_TE, torch.float32)
    if config.method is RoutingMethod.SOFTMAX_AFTER_TOPK:
        best_TK, ids_TK = _top_k(_no_nan(logits_TE), config.top_k)
        weights_TK = torch.softmax(best_TK, dim=-1)
        if not config.normalize:
            weights_TK = torch.softmax(logits_TE, dim=-1).gather(1, ids_TK)
    else:
        scores_TE = _scores(logits_TE, config.method)
        choice_TE = scores_TE if correction_bias_E is None else scores_TE + correction_bias_E.float()
        choice_TE = _no_nan(choice_TE)
        if config.num_groups > 1:
            choice_TE = _mask_groups(choice_TE, config)
        _, ids_TK = _top_k(choice_TE, config.top_k)
        weights_TK = scores_TE.gather(1, ids_TK)
        if config.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + _EPS)
    if config.routed_scaling_factor != 1.0:
        weights_TK = weights_TK * config.routed_scaling_factor
    return StandardTopK(weights_TK, ids_TK.to(torch.int32))


def drop_padding(topk: StandardTopK, num_live: torch.Tensor, first_token: int = 0) -> StandardTopK:
    """The routing with -1 for the experts of padding: the tokens of the step from `num_live`, int32 [1], on.

    `first_token` is the place in the step of the first token here.
    """
    tokens_T1 = torch.arange(topk.ids.shape[0], device=topk.ids.device)[:, None] + first_token
    return StandardTopK(topk.weights, torch.where(tokens_T1 < num_live, topk.ids, -1))


def _scores(logits_TE: torch.Tensor, method: RoutingMethod) -> torch.Tensor:
    if method is RoutingMethod.SIGMOID_GROUPED:
        return torch.sigmoid(logits_TE)
    return torch.nn.functional.softplus(logits_TE).sqrt()


def _no_nan(values: torch.Tensor) -> torch.Tensor:
    """Replace NaN by a value below every number but above the -inf of masked groups."""
    return torch.nan_to_num(values, -_LARGEST, _LARGEST, -_LARGEST)


def _top_k(values_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk` in which ties take the lowest id, which `torch.topk` does not guarantee."""
    best, ids = torch.sort(values_TE, dim=-1, descending=True, stable=True)
    return best[:, :k], ids[:, :k]


def _mask_groups(choice_TE: torch.Tensor, config: RoutingConfig) -> torch.Tensor:
    """Keep the groups with the largest sum of their two best choices; -inf elsewhere (0 would beat negative ones)."""
    choice_TGE = choice_TE.unflatten(1, (config.num_groups, -1))
    group_scores_TG = choice_TGE.topk(min(2, choice_TGE.shape[-1]), dim=-1).values.sum(-1)
    _, kept = _top_k(group_scores_TG, config.num_kept_groups)
    is_kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter_(1, kept, True)
    return choice_TGE.masked_fill(~is_kept_TG[..., None], float("-inf")).flatten(1)
