"""Search of launch plans for the triton backend: every field of interest in turn, the best value kept."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moe.errors import MoeConfigError
from moe.kernels.launch import run_layer
from moe.kernels.plan import Plan
from moe.types import StandardTopK

Timer = Callable[[list[Callable[[], Any]]], float]

# Values that are tried one after the other; the fields of the first matrix, then those of the second.
DIRECT_FIELDS: list[dict[str, list[Any]]] = [
    {"block_n_1": [64, 128], "stages_1": [3, 4, 6], "warps_1": [4]},
    {"block_n_1": [64], "stages_1": [4, 6], "warps_1": [2]},
    {"block_n_1": [128], "stages_1": [4], "warps_1": [8]},
    {"block_n_2": [64, 128], "stages_2": [3, 4, 6], "warps_2": [4], "split_k": [1, 2, 3]},
    {"block_n_2": [64], "stages_2": [4, 6], "warps_2": [2], "split_k": [1, 2]},
    {"prefetch": [True]},
    {"by_expert": [True, False]},
    {"pdl": [False], "prefetch": [False]},
]
GROUPED_FIELDS: list[dict[str, list[Any]]] = [
    {"block_n_1": [64, 128], "warps_1": [4]},
    {"block_n_1": [128, 256], "warps_1": [8]},
    {"block_n_1": [256], "warps_1": [16]},
    {"stages_1": [2, 4]},
    {"block_n_2": [64, 128], "warps_2": [4]},
    {"block_n_2": [128, 256], "warps_2": [8]},
    {"block_n_2": [256], "warps_2": [16]},
    {"stages_2": [2, 4]},
    {"tile_group": [1, 2, 8, 16]},
    {"pdl": [False]},
]


def starts(num_tokens: int, num_experts: int, top_k: int) -> list[Plan]:
    """Plans from which the search sets out."""
    rows = num_tokens * top_k / num_experts
    plans = []
    if num_tokens * top_k <= 512:
        sizes = (8, 16) if num_tokens <= 16 else (16, 32)
        direct = {"direct": True, "block_n_1": 64, "block_n_2": 64, "split_k": 2, "pdl": True}
        plans += [Plan(block_m=size, by_expert=num_tokens > 16, **direct) for size in sizes]
    if num_tokens > 16:
        for block_m, heights in ((16, 1), (32, 2), (64, 3), (128, 3), (256, 3)):
            if min(rows, 256) / 3 <= block_m <= max(16, 2.5 * rows):
                wide = {"warps_1": 8, "warps_2": 8} if block_m >= 128 else {}
                sizes_n = {"block_n_1": 128, "block_n_2": 128, "stages_1": 3, "stages_2": 3}
                plans.append(Plan(direct=False, block_m=block_m, heights=heights, pdl=True, **sizes_n, **wide))
    return plans


def sweep(infos: list[Any], x: torch.Tensor, topks: list[StandardTopK], timer: Timer) -> Iterator[dict[str, Any]]:
    """Rows {plan, us} of everything tried; a plan that does not launch is left out."""
    layer = infos[0].layer
    for start in starts(x.shape[0], layer.num_experts, layer.top_k):
        best, best_us = start, _time(start, infos, x, topks, timer)
        if best_us == float("inf"):
            continue
        yield {"plan": dataclasses.asdict(start), "us": best_us}
        for fields in DIRECT_FIELDS if start.direct else GROUPED_FIELDS:
            for changes in _products(fields):
                try:
                    plan = dataclasses.replace(best, **changes)
                except MoeConfigError:
                    continue
                us = _time(plan, infos, x, topks, timer)
                if us < float("inf"):
                    yield {"plan": dataclasses.asdict(plan), "us": us}
                if us < best_us:
                    best, best_us = plan, us


def _products(fields: dict[str, list[Any]]) -> list[dict[str, Any]]:
    products: list[dict[str, Any]] = [{}]
    for field, values in fields.items():
        products = [product | {field: value} for product in products for value in values]
    return products


def _time(plan: Plan, infos: list[Any], x: torch.Tensor, topks: list[StandardTopK], timer: Timer) -> float:
    out = torch.empty_like(x)

    def call(copy: int, topk: StandardTopK) -> Callable[[], None]:
        return lambda: run_layer(x, topk.ids, topk.weights, infos[copy].layer, plan, out)

    try:
        return round(statistics.median(timer([call(c, topk) for c in range(len(infos))]) for topk in topks), 2)
    except Exception as error:  # too much shared memory, say: not a candidate
        print(f"left out {plan}: {type(error).__name__}: {str(error)[:160]}", flush=True)
        torch.cuda.synchronize()
        return float("inf")
