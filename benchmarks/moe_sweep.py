"""Search of launch plans for the triton backend: both matrices on their own first, then what they share.

Everything the first round tries is compiled ahead by a pool of processes, which share Triton's cache with this one.
"""

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.moe_cases import CASES, random_experts, routing
from benchmarks.moe_warm import in_processes
from moe.backends.triton import TritonBackend
from moe.errors import MoeConfigError
from moe.kernels.launch import Layer, run_layer
from moe.kernels.plan import MAX_DIRECT_SLOTS, Plan
from moe.topology import Topology
from moe.types import StandardTopK

_WARM_EXPERTS = 16  # compiled kernels are the same for every multiple of 16 experts
_REPLAYS = 5

DIRECT_ROWS = 4  # mean rows of an expert beyond which sorting the slots has always paid

Changes = dict[str, Any]


def starts(num_tokens: int, num_experts: int, top_k: int, format_name: str) -> list[Plan]:
    """Plans from which the search sets out: one per kind that may pay."""
    num_slots, rows = num_tokens * top_k, num_tokens * top_k / num_experts
    plans = []
    if num_slots <= MAX_DIRECT_SLOTS and rows <= DIRECT_ROWS:
        for size in (8,) if num_tokens <= 8 else (8, 16):
            if num_slots <= 2 * num_experts:
                plans.append(_direct(size, by_expert=False))
            if num_slots >= num_experts:
                plans.append(_direct(size, by_expert=True))
    if num_tokens >= 32:
        for block_m, heights in ((16, 1), (32, 1), (64, 2), (128, 3)):
            if min(rows, 128) / 2 <= block_m <= max(16, 3 * rows):
                plans.append(_grouped(block_m, heights, fp8=False))
                if format_name == "fp8_block" and block_m >= 64:
                    plans.append(_grouped(block_m, heights, fp8=True))
    return plans


def _direct(block_m: int, *, by_expert: bool) -> Plan:
    return Plan(direct=True, block_m=block_m, block_n_1=64, block_n_2=64, split_k=2, by_expert=by_expert, pdl=True)


def _grouped(block_m: int, heights: int, *, fp8: bool) -> Plan:
    return Plan(
        direct=False, block_m=block_m, heights=heights, block_n_1=128, block_n_2=128, stages_1=3, stages_2=3, pdl=True,
        fp8_activations=fp8,
    )  # fmt: skip


def first_round(start: Plan) -> tuple[list[Changes], list[Changes]]:
    """Changes of the first and of the second matrix: columns of weights, warps, stages and what belongs to them."""

    def one(n: int, w: int, s: int) -> Changes:
        return {"block_n_1": n, "warps_1": w, "stages_1": s}

    def two(n: int, w: int, s: int, **more: Any) -> Changes:
        return {"block_n_2": n, "warps_2": w, "stages_2": s} | more

    if start.direct:
        tiles = [
            (64, 4, 3),
            (64, 4, 4),
            (64, 4, 6),
            (64, 2, 3),
            (64, 2, 4),
            (64, 2, 6),
            (128, 4, 4),
            (128, 8, 3),
            (128, 8, 4),
        ]
        splits = [two(64, 4, 4, split_k=3), two(128, 4, 4, split_k=3)]
        return [one(*tile) for tile in tiles], splits + [two(*tile, split_k=k) for tile in tiles for k in (1, 2)]
    tiles = [(128, 4, 3), (128, 4, 4), (128, 8, 4)]
    if start.block_m <= 64:
        tiles += [(64, 4, 3), (64, 4, 4)]
    if start.block_m <= 32:  # bound by reading weights: more of them on their way
        tiles += [(64, 4, 6), (64, 2, 4), (128, 4, 6)]
    if not start.fp8_activations:
        tiles += [(256, 8, 3), (256, 8, 4)]
    return [one(*tile) for tile in tiles], [two(*tile) for tile in tiles]


# What needs no compilation of its own.
_LAST_ROUND: list[Changes] = [{"tile_group": size} for size in (1, 2, 8, 16)]


def warm(jobs: list[tuple[str, str, int]]) -> int:
    """Compile every plan of the first rounds of (model, format, tokens); returns how many."""
    distinct = {}
    for model, format_name, num_tokens in jobs:
        case = CASES[model]
        for start in starts(num_tokens, case.num_experts, case.top_k, format_name):
            ones, twos = first_round(start)
            for index in range(max(len(ones), len(twos))):  # a plan has two kernels: pairs compile each of them once
                plan = _changed(start, ones[index % len(ones)] | twos[index % len(twos)])
                slots = num_tokens * case.top_k if start.direct and num_tokens > start.block_m else 0
                size = (case.top_k, case.hidden_size, case.intermediate_size, slots)
                distinct[format_name, size, plan] = (model, format_name, num_tokens, plan)
    work = [job for job in distinct.values() if job[3] is not None]
    work.sort(key=lambda job: -job[3].block_m * job[3].heights)  # the slowest first
    in_processes(_compile, work, len(work))
    return len(work)


_layers: dict[tuple[str, str], Any] = {}


def _compile(job: tuple[str, str, int, Plan]) -> str | None:
    """None, or why the plan did not run."""
    model, format_name, num_tokens, plan = job
    case = dataclasses.replace(CASES[model], num_experts=_WARM_EXPERTS, num_active={})
    device = torch.device("cuda")
    if (model, format_name) not in _layers:
        experts = random_experts(case, format_name, device, seed=0)
        info = TritonBackend().prepare(experts, case.config(), Topology(device=device))
        _layers.clear()  # of one at a time, so that many processes fit on a card
        _layers[model, format_name] = info.layer
    layer = _layers[model, format_name]
    x = torch.randn(num_tokens, case.hidden_size, device=device).bfloat16()
    topk = routing(case, num_tokens, "uniform", device, seed=0)
    try:
        run_layer(x, topk.ids, topk.weights, layer, plan, torch.empty_like(x))
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, say: the search will say so too
        return f"not compiled: {plan}: {str(error)[:100]}"
    return None


def sweep(
    layers: list[Layer], x: torch.Tensor, topks: list[StandardTopK], format_name: str
) -> Iterator[dict[str, Any]]:
    """Rows {plan, us} of everything tried; a plan that does not launch is left out."""
    times: dict[Plan, float] = {}

    def measure(plan: Plan | None) -> float:
        if plan is None:
            return float("inf")
        if plan not in times:
            times[plan] = _time(plan, layers, x, topks)
        return times[plan]

    for start in starts(x.shape[0], layers[0].num_experts, layers[0].top_k, format_name):
        merged: Changes = {}
        for changes in first_round(start):
            merged |= min(changes, key=lambda change: measure(_changed(start, change)))
        best = min((start, _changed(start, merged)), key=measure) or start
        if not best.direct:
            min((_changed(best, choice) for choice in _LAST_ROUND), key=measure)
    for plan, us in times.items():
        if us < float("inf"):
            yield {"plan": dataclasses.asdict(plan), "us": us}


def _changed(plan: Plan, changes: Changes) -> Plan | None:
    try:
        return dataclasses.replace(plan, **changes)
    except MoeConfigError:
        return None


def _time(plan: Plan, layers: list[Layer], x: torch.Tensor, topks: list[StandardTopK]) -> float:
    """Median of replays of one graph that calls every copy with an id set of its own, microseconds per call."""
    out = torch.empty_like(x)

    def calls() -> None:
        for index in range(max(len(layers), len(topks))):
            topk = topks[index % len(topks)]
            run_layer(x, topk.ids, topk.weights, layers[index % len(layers)], plan, out)

    try:
        run_layer(x, topks[0].ids, topks[0].weights, layers[0], plan, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        graph.replay()
        times = []
        for _ in range(_REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / max(len(layers), len(topks)))
        return round(statistics.median(times), 2)
    except Exception as error:  # too much shared memory, say: not a candidate
        print(f"left out {plan}: {type(error).__name__}: {str(error)[:160]}", flush=True)
        torch.cuda.synchronize()
        return float("inf")
