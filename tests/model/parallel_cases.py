"""Layouts and steps of the tests of divided models; used by threads and by processes, so it is quick to import."""

import dataclasses
from typing import Any

import torch

from model.decoder import Model
from model.parallel import ParallelLayout
from tests.model.paged import PagedCache, run

# name: the sizes of a layout
TWO = {"tp2": {"tp_size": 2}, "tp2-ep2": {"tp_size": 2, "ep_size": 2}, "dp2-ep2": {"dp_size": 2, "ep_size": 2}}
FOUR = {
    "tp4": {"tp_size": 4},
    "tp4-ep2": {"tp_size": 4, "ep_size": 2},
    "tp4-ep4": {"tp_size": 4, "ep_size": 4},
    "dp4-ep4": {"dp_size": 4, "ep_size": 4},
    "dp4-ep2": {"dp_size": 4, "ep_size": 2},
    "tp2-dp2-ep4": {"tp_size": 2, "dp_size": 2, "ep_size": 4},
    "tp2-dp2-ep2": {"tp_size": 2, "dp_size": 2, "ep_size": 2},
}
TOLERANCE = 1e-4  # of a row's largest logit
# What the requests of each data-parallel rank feed in each step; the third rank has nothing to do at first.
PROMPTS = [{"a": [3, 1, 4, 1, 5, 9, 2, 6], "b": [7, 8]}, {"c": [11]}, {}, {"d": list(range(20))}]
NEXT = [{"a": [5], "b": [9]}, {"c": [2, 3, 4]}, {"e": [40, 41]}, {}]


def run_steps(
    model: Model, layout: ParallelLayout, *, agrees: bool = True, all_ranks_decode: bool = False
) -> dict[str, torch.Tensor]:
    """Logits by request of this rank's part of both steps; `agrees`: the ranks know beforehand who has most tokens."""
    cache = PagedCache(model.kv_specs)
    logits: dict[str, torch.Tensor] = {}
    for step in (PROMPTS, NEXT):
        tokens = step[layout.dp_rank]
        most = max(sum(map(len, requests.values())) for requests in step[: layout.dp_size])
        agreed: dict[str, Any] = {"max_rank_tokens": most if agrees else None, "all_ranks_decode": all_ranks_decode}
        if not tokens:
            model.run_idle(**agreed)
            continue
        rows = run(model, dataclasses.replace(cache.batch(tokens, all_logits=True), **agreed), cache.layers)
        for name, own in zip(tokens, rows.split([len(ids) for ids in tokens.values()]), strict=True):
            logits[name] = torch.cat((logits[name], own)) if name in logits else own
    return logits


def expected(model: Model, dp_size: int) -> list[dict[str, torch.Tensor]]:
    """What a model alone makes of each data-parallel rank's requests."""
    layout = ParallelLayout(dp_size=4, ep_size=4)
    return [run_steps(model, dataclasses.replace(layout, rank=rank)) for rank in range(dp_size)]


def worst_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest difference of any logit, relative to the largest logit of its row; infinite if requests are missing."""
    if got.keys() != want.keys():
        return float("inf")
    errors = [
        ((got[name] - want[name]).abs().amax(1) / want[name].abs().amax(1)).max().nan_to_num(nan=float("inf"))
        for name in want
    ]
    return float(max(errors, default=torch.tensor(0.0)))
