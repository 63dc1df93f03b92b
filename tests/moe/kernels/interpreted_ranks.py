"""Runs `columns` or `sum_norm` in Triton's interpreter on ranks that are processes with shared memory.

Prints wrong rounds as JSON. A rank in turn is late in each round: the others must wait for what it writes. The planted
faults show that a wrong order would be seen.
"""

import json
import math
import mmap
import sys
import time

import torch

from moe.kernels.columns import GatherColumns
from moe.kernels.sum_norm import SumNorm
from tests.forked_ranks import sum_over_ranks

MAX_RANKS, LAG_S, CPU = 4, 0.03, torch.device("cpu")


def shared(num_ranks: int, *shape: int) -> list[torch.Tensor]:
    """int32 zeros for each rank, which all ranks see."""
    memories = [mmap.mmap(-1, 4 * math.prod(shape)) for _ in range(num_ranks)]
    return [torch.frombuffer(memory, dtype=torch.int32).view(shape) for memory in memories]


def places(memories: list[torch.Tensor]) -> list[int]:
    return [memory.data_ptr() for memory in memories]


def columns(step: int, rank: int, num_ranks: int) -> tuple[torch.Tensor, int, int]:
    """A rank's columns, the width, and how many columns all ranks have."""
    num_rows, width = 1 + step % 3, (32, 71, 5)[step % 3]
    num_columns = num_ranks * width - (step % 2) * (width + 2)  # the last ranks have fewer or none
    num_own = max(0, min(width, num_columns - rank * width))
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(num_rows, num_own, generator=g), width, num_columns


def wrong_columns(num_ranks: int, fault: str = "") -> int:
    """Wrong rounds of all ranks; a rank that does not end counts all its rounds.

    Between two rounds the ranks meet, as in a step, which begins with a sum over them.
    """
    memory, flags, met = (
        shared(num_ranks, 3 * 3 * MAX_RANKS * 32),
        shared(num_ranks, 3 * 3 * MAX_RANKS),
        shared(num_ranks),
    )

    def wrong_rounds(rank: int) -> int:
        wrong, kernel = 0, GatherColumns(places(memory), places(flags), rank, MAX_RANKS, 32, CPU)
        for step in range(8):
            if step % num_ranks == rank:
                time.sleep(LAG_S)
            if fault == "no wait":
                flags[rank].fill_(1)
            own, width, num_columns = columns(step, rank, num_ranks)
            out = torch.full((own.shape[0], num_columns + 8), float("nan"))[:, :num_columns]
            kernel(own, out, width)
            want = torch.cat([columns(step, other, num_ranks)[0] for other in range(num_ranks)], dim=1)
            wrong += not torch.equal(out, want)
            met[rank].fill_(step + 1)
            while min(map(int, met)) <= step:
                time.sleep(0.001)
        return wrong

    wrong = sum_over_ranks(num_ranks, wrong_rounds, most=8)
    return wrong + (0 if fault else sum(int(each.count_nonzero()) for each in flags))


def summands(step: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x, the same on all ranks, and a rank's part."""
    g, num_rows = torch.Generator().manual_seed(step), 1 + 3 * step % 4
    x = torch.randn(num_rows, 200, generator=g).to(dtype)[:, :100]
    return x, torch.randn(num_rows, 100, generator=g.manual_seed(1000 + 10 * step + rank)).to(dtype)


def wrong_sums(num_ranks: int, dtype: torch.dtype = torch.float32, fault: str = "") -> int:
    """The same; places alternate, and the number of rows changes, as in steps that follow each other."""
    parts, flags = ([shared(num_ranks, 4, width) for _ in range(2)] for width in (100, MAX_RANKS))
    weight, eps = torch.randn(100, generator=torch.Generator().manual_seed(5)), 1e-3

    def wrong_rounds(rank: int) -> int:
        wrong = 0
        kernels = [SumNorm(places(parts[at]), places(flags[at]), rank, MAX_RANKS, CPU) for at in range(2)]
        for step in range(12):
            x, part = summands(step, rank, dtype)
            if step % num_ranks == rank:
                time.sleep(LAG_S)
            written = parts[(step + (fault == "wrong place" and rank == 1)) % 2][rank]
            written.view(-1).view(dtype)[: part.numel()] = part.flatten()
            if fault == "no wait":
                flags[0][rank].fill_(1)
                flags[1][rank].fill_(1)
            own = None if step % 5 == 4 else x
            summed, normed = kernels[step % 2](own, part, weight, eps)
            total = (
                torch.stack([summands(step, other, dtype)[1].float() for other in range(num_ranks)]).sum(0).to(dtype)
            )
            want = total if own is None else own + total
            want_normed = torch.nn.functional.rms_norm(want.float(), (100,), weight, eps).to(dtype)
            is_close = torch.allclose(normed, want_normed, rtol=2e-6 if dtype == torch.float32 else 2e-3, atol=1e-6)
            wrong += not (torch.equal(summed, want) and is_close)
        return wrong

    wrong = sum_over_ranks(num_ranks, wrong_rounds, most=12)
    return wrong + (0 if fault else sum(int(each.count_nonzero()) for at in flags for each in at))


def main(kernel: str) -> dict[str, int]:
    if kernel == "columns":
        return {"two": wrong_columns(2), "three": wrong_columns(3), "no wait": wrong_columns(2, "no wait")}
    found = {"two": wrong_sums(2), "two, fp16": wrong_sums(2, torch.float16), "three": wrong_sums(3)}
    return found | {fault: wrong_sums(2, fault=fault) for fault in ("no wait", "wrong place")}


if __name__ == "__main__":
    json.dump(main(sys.argv[1]), sys.stdout)
