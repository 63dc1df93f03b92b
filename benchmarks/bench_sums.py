"""Sums over tensor-parallel GPUs, by one kernel that reads the other GPUs' memory and by NCCL, in CUDA graphs.

    python -m benchmarks.bench_sums [--ranks 2] [--hidden 2880] [--tokens 1,16,64,128,182]

Each row has the microseconds of one sum of [tokens, hidden] in bf16, the slowest rank's median, and whether both ways
give the same numbers where adding rounds nothing. `wrong_sums` counts wrong ones of many that follow each other in the
one buffer, in a graph, while one rank or another lags behind. The last line is JSON. Exit status 1: a sum is wrong, or
the kernel does not work here. `--device cpu` measures gloo, without graphs, to try the program.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import distributed

from model.norm import RmsNorm
from moe.group import Group, PartialSum, SumPlace, TorchGroup
from moe.one_shot import OneShotGroup, with_one_shot
from moe.shared_memory import MAX_BYTES

SUMS_PER_GRAPH = 50
ROUNDS = 21
REPLAYS = 40  # of the graph whose sums are all compared
LAG_CYCLES = 20_000  # about 10 us of a GPU


def captured(calls: Callable[[], None]) -> Callable[[], None]:
    """A function that replays them, in one CUDA graph. They run once before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        calls()
    return graph.replay


def median_us(call: Callable[[], None], group: Group, device: torch.device, *, num_calls: int, captures: bool) -> float:
    """Median of the slowest rank for one call. `num_calls` follow each other, in a graph where it can be captured."""

    def calls() -> None:
        for _ in range(num_calls):
            call()

    launch, times = captured(calls) if captures else calls, []
    for _ in range(ROUNDS):
        group.max([0.0])  # all begin together
        start_s = time.perf_counter()
        launch()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start_s) / num_calls * 1e6)
    return round(group.max([statistics.median(times)])[0], 2)


def time_us(group: Group, shape: tuple[int, int], device: torch.device) -> float:
    """Of one sum. Zeros stay zeros."""
    x, captures = torch.zeros(shape, dtype=torch.bfloat16, device=device), device.type == "cuda"
    return median_us(lambda: group.all_reduce(x), group, device, num_calls=SUMS_PER_GRAPH, captures=captures)


def count_wrong_sums(group: Group, plain: Group, shape: tuple[int, int], device: torch.device) -> int:
    """How many of `REPLAYS` times `SUMS_PER_GRAPH` sums are wrong on any rank.

    Each sum has other numbers, written where `group.empty` says, as layers do: a rank that wrote its next part while
    another still reads would change the sum. After every other sum one of the ranks, in turn, waits.
    """
    numbers = torch.arange(shape[0] * shape[1], device=device).view(shape) % 13
    wrong, step = torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)

    def sums() -> None:
        for index in range(SUMS_PER_GRAPH):
            step.add_(1)
            part = group.empty(shape, torch.bfloat16, device)
            part.copy_(numbers + step % 7 + plain.rank)
            if device.type == "cuda" and index // 2 % plain.size == plain.rank and index % 2:
                torch.cuda._sleep(LAG_CYCLES)
            summed = (numbers + step % 7) * plain.size + plain.size * (plain.size - 1) // 2
            wrong.add_((group.all_reduce(part) != summed).any())

    launch = captured(sums) if device.type == "cuda" else sums
    for _ in range(REPLAYS if device.type == "cuda" else 1):
        launch()
    return int(plain.max([float(wrong)])[0])


def time_norm_us(group: Group, shape: tuple[int, int], device: torch.device) -> float:
    """Of one sum, the addition of it and the norm, by the ways that `group` has. Zeros stay zeros."""
    norm, captures = RmsNorm(torch.ones(shape[1], device=device), 1e-5), device.type == "cuda"
    x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    sums = [PartialSum(group.empty(shape, x.dtype, device, place).zero_(), group, place) for place in SumPlace]
    turns = itertools.cycle(sums)
    return median_us(lambda: norm.add(x, next(turns)), group, device, num_calls=SUMS_PER_GRAPH, captures=captures)


def count_wrong_norms(group: Group, plain: Group, shape: tuple[int, int], device: torch.device) -> int:
    """How many of `REPLAYS` times `SUMS_PER_GRAPH` sums with their norms are wrong on any rank; compare
    `count_wrong_sums`.

    The two places take turns, and a part is written as soon as the sum at the other place is launched. Every fourth sum
    has half the rows, as the final norm has. The reference is fp32, which is exact for these sums.
    """
    num_ranks, on_gpu = plain.size, device.type == "cuda"
    weight_H = 1.0 + torch.arange(shape[1], device=device) % 3
    norm = RmsNorm(weight_H, 1e-5)
    all_numbers = torch.arange(shape[0] * shape[1], device=device).view(shape) % 13
    wrong, step = torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)

    def sums() -> None:
        for index, place in zip(range(SUMS_PER_GRAPH), itertools.cycle(SumPlace), strict=False):
            step.add_(1)
            numbers = all_numbers[: max(1, shape[0] // 2)] if index % 4 == 1 else all_numbers
            x = (numbers % 7 - 3).to(torch.bfloat16)
            part = group.empty(tuple(numbers.shape), torch.bfloat16, device, place)
            part.copy_(numbers + step % 7 + plain.rank)
            if on_gpu and index // 3 % num_ranks == plain.rank and index % 3:
                torch.cuda._sleep(LAG_CYCLES)
            summed, normed = norm.add(x, PartialSum(part, group, place))
            want = x.float() + (numbers + step % 7) * num_ranks + num_ranks * (num_ranks - 1) // 2
            want_normed = torch.nn.functional.rms_norm(want, weight_H.shape, weight_H, norm.eps)
            is_close = (normed - want_normed).abs() <= 2**-8 * want_normed.abs()
            wrong.add_(~((summed == want) & is_close).all())

    launch = captured(sums) if on_gpu else sums
    for _ in range(REPLAYS if on_gpu else 1):
        launch()
    return int(plain.max([float(wrong)])[0])


def is_right(one_shot: Group, plain: Group, shape: tuple[int, int], device: torch.device) -> bool:
    """On all ranks."""
    x = (torch.arange(shape[0] * shape[1], device=device).view(shape) % 17 + plain.rank).to(torch.bfloat16)
    summed = one_shot.all_reduce(x.clone())
    return not plain.max([float(not torch.equal(summed, plain.all_reduce(x)))])[0]


def work(rank: int, args: argparse.Namespace, meeting: str) -> None:
    """One rank; the first prints."""
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", init_method=f"file://{meeting}", rank=rank, world_size=args.ranks
    )
    plain = TorchGroup()
    one_shot = with_one_shot(plain, device) if on_gpu else plain
    works, rows = isinstance(one_shot, OneShotGroup), []
    norms_work = isinstance(one_shot, OneShotGroup) and one_shot.has_kernels
    for tokens in args.tokens:
        shape = (tokens, args.hidden)
        row = {"tokens": tokens, "bytes": 2 * tokens * args.hidden, "plain_us": time_us(plain, shape, device)}
        if works and row["bytes"] <= MAX_BYTES:
            row |= {"one_shot_us": time_us(one_shot, shape, device), "right": is_right(one_shot, plain, shape, device)}
        if row["bytes"] <= MAX_BYTES:
            row["wrong_sums"] = count_wrong_sums(one_shot, plain, shape, device)
            row["wrong_norms"] = count_wrong_norms(one_shot, plain, shape, device)
        if isinstance(one_shot, OneShotGroup) and row["bytes"] <= MAX_BYTES:
            one_shot.has_kernels = False
            row["two_kernels_us"] = time_norm_us(one_shot, shape, device)
            one_shot.has_kernels = norms_work
            if norms_work:
                row["one_kernel_us"] = time_norm_us(one_shot, shape, device)
        rows.append(row)
        if rank == 0:
            print(row, flush=True)
    if rank == 0:
        device_name = torch.cuda.get_device_name() if on_gpu else "cpu"
        print(
            json.dumps(
                {
                    "device": device_name,
                    "ranks": args.ranks,
                    "one_shot_works": works,
                    "norms_work": norms_work,
                    "rows": rows,
                }
            )
        )
    distributed.destroy_process_group()
    is_wrong = any(not row.get("right", True) or row.get("wrong_sums") or row.get("wrong_norms") for row in rows)
    if (on_gpu and not norms_work) or is_wrong:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2880)
    parser.add_argument(
        "--tokens", type=lambda text: [int(each) for each in text.split(",")], default=[1, 16, 64, 128, 182]
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(args, f"{folder}/meet"), nprocs=args.ranks)


if __name__ == "__main__":
    main()
